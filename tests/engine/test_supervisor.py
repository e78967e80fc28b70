"""The supervisor against a child process that misbehaves to order.

The real engine takes part in `tests/e2e`; here are the moments it cannot be brought to at will.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from worker.engine.generation import Generation, StreamEvent
from worker.engine.supervisor import Supervisor
from worker.errors import (
    Cancelled,
    ContextLengthExceeded,
    CrashLoop,
    DuplicateJob,
    EngineCrashed,
    InferenceFailed,
    InferenceTimeout,
    InsufficientVram,
    InvalidRequest,
    ModelError,
    NotReady,
    QueueFull,
    ShuttingDown,
    WorkerError,
)
from worker.messages import (
    EngineConfig,
    Failed,
    Finished,
    InferenceRequest,
    Sampling,
    Started,
    Token,
    Tokenize,
)
from worker.observability.metrics import Metrics
from worker.settings import Settings

SCRIPTED = (sys.executable, "-m", "tests.support.scripted_engine")
CONFIG = EngineConfig(backend="cpu", model_path="/none", model_ref="scripted", worker_id="w")
ROOT = Path(__file__).resolve().parents[2]


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What each incarnation of the engine does at its start."""
    path = tmp_path / "script"
    monkeypatch.setenv("SCRIPTED_ENGINE", str(path))
    monkeypatch.chdir(ROOT)

    def write(*starts: str) -> None:
        path.write_text("\n".join(starts) + "\n")

    write("ok")
    return write


@asynccontextmanager
async def supervised(**settings: Any) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(Settings(backend="cpu", **settings), Metrics("w"), SCRIPTED)
    try:
        await supervisor.start(CONFIG)
        yield supervisor
    finally:
        await supervisor.stop()


def request(order: str, job_id: str = "j", **fields: Any) -> InferenceRequest:
    return InferenceRequest(job_id, order, Sampling(seed=7), max_tokens=8, **fields)


async def all_of(generation: Generation) -> list[StreamEvent]:
    return [event for frame in [f async for f in generation] for event in frame]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def failure_of(work: Awaitable[object]) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        await work
    return caught.value


@pytest.mark.usefixtures("script")
class TestRequests:
    def test_a_job_goes_from_acceptance_to_its_one_terminal_event(self) -> None:
        async def test() -> None:
            async with supervised() as supervisor:
                generation = await supervisor.submit(request("say a b c"))
                assert (generation.prompt_tokens, generation.seed) == (3, 7)
                events = await all_of(generation)
                assert [type(e) for e in events] == [Started, Token, Token, Token, Finished]
                assert supervisor.running == supervisor.queued == 0
                assert supervisor.last_progress_ms == 0
                assert supervisor.stats is not None

        run(test)

    def test_a_refusal_is_raised_with_its_numbers(self) -> None:
        async def test() -> None:
            async with supervised() as supervisor:
                error = await failure_of(supervisor.submit(request("refuse")))
                assert isinstance(error, ContextLengthExceeded)
                assert error.details == {"prompt_tokens": 9, "context_length": 8}

        run(test)

    def test_cancel_ends_the_stream_at_once_and_is_idempotent(self) -> None:
        async def test() -> None:
            async with supervised() as supervisor:
                assert supervisor.cancel("j") is False
                generation = await supervisor.submit(request("hold"))
                assert supervisor.running == 1
                before = time.monotonic()
                assert supervisor.cancel("j") is True
                events = await all_of(generation)
                assert time.monotonic() - before < 0.1
                assert isinstance(events[-1], Failed)
                assert isinstance(events[-1].error, Cancelled)
                generation.cancel()
                assert supervisor.cancel("j") is True
                assert supervisor.running == 0

        run(test)

    def test_a_job_id_is_free_again_after_the_end_and_taken_before(self) -> None:
        async def test() -> None:
            async with supervised() as supervisor:
                first = await supervisor.submit(request("hold"))
                assert isinstance(
                    await failure_of(supervisor.submit(request("hold"))), DuplicateJob
                )
                first.cancel()
                second = await supervisor.submit(request("say x"))
                assert second.request_id != first.request_id
                assert isinstance((await all_of(second))[-1], Finished)

        run(test)

    def test_a_client_that_leaves_before_acceptance_leaves_nothing_behind(self) -> None:
        async def test() -> None:
            async with supervised() as supervisor:
                pending = asyncio.create_task(supervisor.submit(request("ignore")))
                await until(lambda: supervisor.queued == 1)
                pending.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await pending
                assert supervisor.queued == 0

        run(test)

    def test_a_full_queue_says_when_to_come_back(self) -> None:
        async def test() -> None:
            async with supervised(slots=1, max_queued_requests=1) as supervisor:
                await supervisor.submit(request("hold", "a"))
                await supervisor.submit(request("queue", "b"))
                error = await failure_of(supervisor.submit(request("say x", "c")))
                assert isinstance(error, QueueFull)
                assert error.details["retry_after_seconds"] >= 1

        run(test)

    def test_waiting_prompt_tokens_are_bounded_too(self) -> None:
        async def test() -> None:
            async with supervised(max_queued_prompt_tokens=3) as supervisor:
                await supervisor.submit(request("queue", "a"))
                assert supervisor.queued_prompt_tokens == 3
                error = await failure_of(supervisor.submit(request("say x", "b")))
                assert isinstance(error, QueueFull)

        run(test)

    @pytest.mark.parametrize("order", ["hold", "queue"])
    def test_a_deadline_ends_what_the_engine_forgets(self, order: str) -> None:
        async def test() -> None:
            async with supervised() as supervisor:
                deadline = time.monotonic() + 0.1
                generation = await supervisor.submit(request(order, deadline=deadline))
                last = (await all_of(generation))[-1]
                assert isinstance(last, Failed) and isinstance(last.error, InferenceTimeout)
                assert time.monotonic() - deadline < 1

        run(test)

    def test_a_deadline_also_ends_one_that_was_never_accepted(self) -> None:
        async def test() -> None:
            async with supervised() as supervisor:
                late = supervisor.submit(request("ignore", deadline=time.monotonic() + 0.1))
                assert isinstance(await failure_of(late), InferenceTimeout)

        run(test)

    def test_calls_get_their_own_replies_or_errors(self) -> None:
        async def test() -> None:
            async with supervised() as supervisor:
                first = supervisor.call(lambda n: Tokenize(n, "ab"))
                second = supervisor.call(lambda n: Tokenize(n, "c"))
                replies = await asyncio.gather(first, second)
                assert list(replies) == [(97, 98), (99,)]
                trouble = supervisor.call(lambda n: Tokenize(n, "trouble"))
                assert isinstance(await failure_of(trouble), InferenceFailed)

        run(test)


class TestStart:
    @pytest.mark.parametrize(
        ("start", "kind", "words"),
        [
            ("fail", ModelError, "The file is gone."),
            ("die", ModelError, "SIGABRT"),
            ("kill", InsufficientVram, "lack of memory"),
        ],
    )
    def test_a_failed_start_is_raised(
        self, script: Callable[..., None], start: str, kind: type[WorkerError], words: str
    ) -> None:
        script(start)

        async def test() -> None:
            supervisor = Supervisor(Settings(backend="cpu"), Metrics("w"), SCRIPTED)
            error = await failure_of(supervisor.start(CONFIG))
            assert isinstance(error, kind) and words in error.message
            assert supervisor.state == "failed"
            await supervisor.stop()

        run(test)

    def test_progress_is_seen_until_ready_and_nothing_is_accepted_before(
        self, script: Callable[..., None]
    ) -> None:
        async def test() -> None:
            supervisor = Supervisor(Settings(backend="cpu"), Metrics("w"), SCRIPTED)
            assert supervisor.state == "loading"
            assert isinstance(await failure_of(supervisor.submit(request("say x"))), NotReady)
            phases: list[str] = []

            async def watch() -> None:
                async for progress in supervisor.watch_progress():
                    phases.append(progress.phase)

            watcher = asyncio.create_task(watch())
            await asyncio.sleep(0)
            await supervisor.start(CONFIG)
            await watcher
            assert phases[0] == "starting" and phases[-1] == "ready"
            assert supervisor.info is not None and supervisor.info.pid == supervisor.engine_pid
            await supervisor.stop()

        run(test)


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


@pytest.mark.usefixtures("script")
class TestStop:
    def test_draining_refuses_new_work_and_waits_for_the_old(self) -> None:
        async def test() -> None:
            async with supervised() as supervisor:
                generation = await supervisor.submit(request("hold"))
                supervisor.begin_draining()
                assert supervisor.state == "draining"
                refused = await failure_of(supervisor.submit(request("say x", "k")))
                assert isinstance(refused, ShuttingDown)
                drain = asyncio.create_task(supervisor.drain(20))
                await asyncio.sleep(0.05)
                assert not drain.done()
                generation.cancel()
                await drain

        run(test)

    def test_what_outlives_the_drain_ends_with_its_code(self) -> None:
        async def test() -> None:
            async with supervised() as supervisor:
                generation = await supervisor.submit(request("hold"))
                supervisor.begin_draining()
                await supervisor.drain(0.1)
                last = (await all_of(generation))[-1]
                assert isinstance(last, Failed) and isinstance(last.error, ShuttingDown)

        run(test)

    def test_a_stopped_engine_process_does_not_hold_up_the_stop(self) -> None:
        async def test() -> None:
            async with supervised() as supervisor:
                pid = supervisor.engine_pid
                assert pid is not None
                os.kill(pid, signal.SIGSTOP)
                before = time.monotonic()
                await supervisor.stop()
                assert time.monotonic() - before < 3
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)

        run(test)
