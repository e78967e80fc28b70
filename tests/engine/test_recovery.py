"""The supervisor when its engine dies or stands still at chosen moments.

The real engine is killed in `tests/e2e`; here it dies between two given frames.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.supervised import (
    all_of,
    failure_of,
    request,
    run,
    script,
    supervised,
    until,
)
from worker.engine.supervisor import Supervisor
from worker.errors import (
    Cancelled,
    CrashLoop,
    EngineCrashed,
    InvalidRequest,
    NotReady,
    ResidencyViolation,
)
from worker.messages import (
    Failed,
    Finished,
    Tokenize,
)

__all__ = ["script"]


class TestCrashes:
    def test_streams_in_flight_fail_and_waiting_ones_are_served_by_the_next_engine(
        self, script: Callable[..., None], tmp_path: Path
    ) -> None:
        async def test() -> None:
            async with supervised() as supervisor:
                running = await supervisor.submit(request("hold", "a"))
                # "queue" orders the scripted engine never to start it: it stays, and is
                # accepted again by the second engine under the same generation.
                waiting = await supervisor.submit(request("queue", "b"))
                unread = asyncio.create_task(supervisor.submit(request("ignore", "c")))
                await until(lambda: supervisor.queued == 2)
                first_pid = supervisor.engine_pid
                assert first_pid is not None
                call = asyncio.create_task(supervisor.call(lambda n: Tokenize(n, "silence")))
                await asyncio.sleep(0.05)
                before = time.monotonic()
                os.kill(first_pid, signal.SIGKILL)
                events = await all_of(running)
                assert time.monotonic() - before < 1
                assert isinstance(events[-1], Failed)
                assert isinstance(events[-1].error, EngineCrashed)
                assert isinstance(await failure_of(call), EngineCrashed)
                assert supervisor.state == "recovering"
                assert isinstance(await failure_of(supervisor.submit(request("say x"))), NotReady)
                await until(lambda: supervisor.state == "ready")
                assert supervisor.engine_pid not in (None, first_pid)
                assert supervisor.queued == 2
                assert isinstance((await all_of(await supervisor.submit(request("say x"))))[-1],
                                  Finished)  # fmt: skip
                waiting.cancel()
                assert isinstance((await all_of(waiting))[-1], Failed)
                supervisor.cancel("c")
                assert isinstance(await failure_of(unread), Cancelled)

        run(test)

    def test_a_request_in_flight_at_two_crashes_is_refused(
        self, script: Callable[..., None]
    ) -> None:
        async def test() -> None:
            async with supervised() as supervisor:
                for job in ("a", "b"):
                    generation = await supervisor.submit(request("abort", job))
                    last = (await all_of(generation))[-1]
                    assert isinstance(last, Failed) and isinstance(last.error, EngineCrashed)
                    await until(lambda: supervisor.state == "ready")
                error = await failure_of(supervisor.submit(request("abort", "c")))
                assert isinstance(error, InvalidRequest)
                assert error.details["errors"][0]["constraint"] == "quarantine"
                assert isinstance((await all_of(await supervisor.submit(request("say x"))))[-1],
                                  Finished)  # fmt: skip

        run(test)

    def test_a_request_that_kills_its_reader_does_not_end_the_worker(
        self, script: Callable[..., None]
    ) -> None:
        async def test() -> None:
            async with supervised(crash_limit=5) as supervisor:
                error = await failure_of(supervisor.submit(request("abort-unread")))
                assert isinstance(error, EngineCrashed)
                await until(lambda: supervisor.state == "ready")
                assert not supervisor.fatal.done()
                again = await failure_of(supervisor.submit(request("abort-unread")))
                assert isinstance(again, InvalidRequest)

        run(test)

    def test_a_crash_loop_is_fatal_and_fails_who_waited(self, script: Callable[..., None]) -> None:
        script("ok", "die", "fail", "die")

        async def test() -> None:
            async with supervised(crash_limit=2) as supervisor:
                waiting = await supervisor.submit(request("queue", "b"))
                pid = supervisor.engine_pid
                assert pid is not None
                os.kill(pid, signal.SIGSEGV)
                error = await supervisor.fatal
                assert isinstance(error, CrashLoop) and error.exit_code == 8
                assert error.details["crashes"] == 3
                assert supervisor.state == "failed"
                last = (await all_of(waiting))[-1]
                assert isinstance(last, Failed)

        run(test)

    def test_an_engine_that_stands_still_is_unhealthy_then_replaced(
        self, script: Callable[..., None]
    ) -> None:
        async def test() -> None:
            async with supervised(stall_timeout=0.4) as supervisor:
                await asyncio.sleep(0.6)
                assert not supervisor.stalled  # idle for longer than the timeout
                pid = supervisor.engine_pid
                generation = await supervisor.submit(request("hold"))
                await until(lambda: supervisor.stalled)
                assert supervisor.last_progress_ms >= 400
                assert supervisor.engine_pid == pid
                last = (await all_of(generation))[-1]
                assert isinstance(last, Failed) and isinstance(last.error, EngineCrashed)
                assert "no progress" in last.error.message
                await until(lambda: supervisor.state == "ready")
                assert supervisor.engine_pid != pid

        run(test)


def lost(supervisor: Supervisor) -> str | None:
    return supervisor.residency_lost


def test_a_device_that_vanishes_ends_the_worker_after_its_streams(
    script: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engine.supervisor.RESIDENCY_INTERVAL_SECONDS", 0.1)

    async def test() -> None:
        async with supervised() as supervisor:
            running = await supervisor.submit(request("hold", "a"))
            await asyncio.sleep(0.3)
            assert lost(supervisor) is None and supervisor.state == "ready"
            (tmp_path / "script.gone").touch()
            error = await supervisor.fatal
            assert isinstance(error, ResidencyViolation) and error.exit_code == 5
            assert lost(supervisor) == "CUDA0 is gone."
            assert isinstance(await failure_of(supervisor.submit(request("say x"))), NotReady)
            assert supervisor.running == 1, "what runs may finish"
            running.cancel()

    run(test)
