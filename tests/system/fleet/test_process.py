"""A worker's process under its owner, without Ray."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path

import pytest

from worker.fleet.process import MAX_MISSES, WorkerProcess

pytestmark = pytest.mark.anyio
FLAGS = ["--slots", "2", "--threads", "1"]


@pytest.mark.parametrize("level", ["info", "error"])
async def test_an_owner_finds_its_worker_whatever_it_logs(
    level: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The owner learns the port from a log line, and forwards the configured log lines. Settings of
    a single worker in the shell that started Ray do not affect the fleet, nor do modules in that
    shell's folder."""
    for name in ("secrets", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(__file__)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    for name, value in {
        "LLORCH_API_PREFIX": "/llm",
        "llorch_uds": "/no",
        "MODEL_PATH": "/no",
    }.items():
        monkeypatch.setenv(name, value)
    process = WorkerProcess("cpu", "127.0.0.1", "secret", FLAGS, level)
    try:
        async with asyncio.timeout(120):
            await process.until_ready()
        answer = await process.ask("/health")
        assert answer is not None and answer.status == 200
    finally:
        process.kill()
    levels = {json.loads(each)["level"] for each in capsys.readouterr().err.splitlines()}
    assert ("info" in levels) == (level == "info")


async def test_an_owner_without_a_free_descriptor_blames_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise Serve would replace every worker of a machine that is short of memory."""

    async def refused(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    process = WorkerProcess("cpu", "127.0.0.1", "secret", FLAGS)
    try:
        async with asyncio.timeout(120):
            await process.until_ready()
            with monkeypatch.context() as short:
                short.setattr(asyncio, "open_connection", refused)
                waiting = asyncio.create_task(process.until_ready())
                for _ in range(MAX_MISSES):
                    await process.check()
                assert await process.n_requests() is None
                assert not waiting.done()
            await waiting
        assert await process.n_requests() == 0
    finally:
        process.kill()
