"""Everything that reports the worker's state agrees, even after a fatal error."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.supervised import engine_pid, request, submit, supervised, until
from worker.api.app import DIALECTS, create_app
from worker.api.http.state import AppState
from worker.errors import CallbackFailed
from worker.observability.metrics import Metrics
from worker.settings import Settings
from worker.supervisor.engine_process import EngineProcess
from worker.supervisor.supervisor import Supervisor

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("script")]


async def told_by(supervisor: Supervisor) -> dict[str, Any]:
    """Return what each path reports, in one table."""
    state = AppState(Settings(), supervisor, Metrics("w"), "w", "m", "i", lambda: None)
    transport = httpx.ASGITransport(create_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        health, ready = await client.get("/health"), await client.get("/ready")
        gauges = dict(
            line.split(" ")
            for line in (await client.get("/metrics")).text.splitlines()
            if line.startswith("worker_re") and "{" not in line
        )
    status = supervisor.status()
    return {
        "pool": status.pool_status,
        "states": {status.state, health.json()["state"], ready.json()["state"]},
        "ready": {status.is_ready, ready.status_code == 200, gauges["worker_ready"] == "1.0"},
        "resident": {
            status.resident,
            health.json()["resident"],
            gauges["worker_resident"] == "1.0",
        },
        "health": health.json(),
    }


async def crash_loop(supervisor: Supervisor, folder: Path) -> None:
    os.kill(engine_pid(supervisor), signal.SIGSEGV)
    await supervisor.fatal


async def vanished_device(supervisor: Supervisor, folder: Path) -> None:
    (folder / "script.gone").touch()
    await supervisor.fatal


async def refusing_manager(supervisor: Supervisor, folder: Path) -> None:
    supervisor.fail(CallbackFailed("the manager refused"))


Ending = Callable[[Supervisor, Path], Awaitable[None]]


@pytest.mark.parametrize("ending", [crash_loop, vanished_device, refusing_manager])
async def test_after_a_fatal_error_all_reports_agree(
    script: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: Ending,
) -> None:
    script("ok", "die")
    monkeypatch.setattr("worker.supervisor.supervisor.RESIDENCY_SECONDS", 0.05)

    async with supervised(crash_limit=1) as supervisor:
        before = await told_by(supervisor)
        assert before["resident"] == before["ready"] == {True} and before["pool"] == "ready"
        await ending(supervisor, tmp_path)
        error = supervisor.status().error
        assert error is not None
        for _ in ("at once", "on the worker's way out"):
            after = await told_by(supervisor)
            assert after["states"] == {"failed"} and after["pool"] == "failed"
            assert after["ready"] == after["resident"] == {False}
            assert after["health"]["status"] == "unhealthy"
            assert after["health"]["reason"] == error.message
            supervisor.begin_draining()


async def test_nothing_is_resident_between_two_engines(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        os.kill(engine_pid(supervisor), signal.SIGSEGV)
        await until(lambda: supervisor.state == "recovering")
        between = await told_by(supervisor)
        assert between["states"] == {"recovering"} and between["pool"] == "loading"
        assert between["ready"] == between["resident"] == {False}
        assert supervisor.status().vram_bytes == 0
        assert between["health"]["status"] == "healthy", "it is being put right"
        await until(lambda: supervisor.state == "ready")
        assert (await told_by(supervisor))["resident"] == {True}


async def test_each_head_is_answered_while_the_model_loads() -> None:
    """Otherwise the connection's next request would wait for the end of the answer."""
    supervisor = Supervisor(Settings(), Metrics("w"), EngineProcess())
    state = AppState(Settings(), supervisor, Metrics("w"), "w", "m", "i", lambda: None)
    paths = [each.path for all in DIALECTS for each in all.operations if each.method == "GET"]
    assert supervisor.state == "loading" and "/v1/loading/progress" in paths
    transport = httpx.ASGITransport(create_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for path in paths:
            async with asyncio.timeout(10):
                answer = await client.head(re.sub(r"{\w+}", "a", path))
            assert answer.status_code in (200, 400, 404, 503), path


async def test_a_draining_worker_is_resident_and_reports_its_running_request() -> None:
    async with supervised() as supervisor:
        job = await submit(supervisor, request("hold"))
        await asyncio.sleep(0.05)
        assert (await told_by(supervisor))["pool"] == "busy"
        supervisor.begin_draining()
        reports = await told_by(supervisor)
        assert reports["states"] == {"draining"} and reports["resident"] == {True}
        assert reports["health"]["running"] == 1 and reports["pool"] == "draining"
        job.cancel()
