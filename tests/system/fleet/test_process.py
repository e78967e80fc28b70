"""A worker's process as its owner has it, without Ray."""

from __future__ import annotations

import asyncio
import json

import pytest

from worker.fleet.process import WorkerProcess


@pytest.mark.anyio
@pytest.mark.parametrize("level", ["info", "error"])
async def test_an_owner_finds_its_worker_whatever_it_logs(
    level: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port is told in a line of the log, and the owner passes on what was asked for. Settings
    of a worker of its own, in the shell that has started Ray, are not the fleet's."""
    for name, value in {
        "LLORCH_API_PREFIX": "/llm",
        "llorch_uds": "/no",
        "MODEL_PATH": "/no",
    }.items():
        monkeypatch.setenv(name, value)
    line = ["--slots", "2", "--threads", "1"]
    process = WorkerProcess("cpu", "127.0.0.1", "secret", line, level)
    try:
        async with asyncio.timeout(120):
            await process.until_ready()
        answer = await process.ask("/health")
        assert answer is not None and answer.status == 200
    finally:
        process.kill()
    levels = {json.loads(each)["level"] for each in capsys.readouterr().err.splitlines()}
    assert ("info" in levels) == (level == "info")
