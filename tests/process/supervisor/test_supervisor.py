"""The supervisor with a child process that misbehaves on demand.

The real engine is in `tests/system/worker`; here are the states that it cannot be brought into at
will.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.support import clock
from tests.support.supervised import (
    CONFIG,
    all_of,
    ask,
    engine_pid,
    failure_of,
    request,
    submit,
    supervised,
    unstarted,
    until,
)
from worker.errors import (
    Cancelled,
    ConfigError,
    ContextLengthExceeded,
    DuplicateJob,
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
from worker.supervisor.job import Inbox
from worker.wire.black_box import MODEL
from worker.wire.messages import Failed, Finished, Preparing, Started, Token
from worker.wire.work import Tokenize, Tokenized

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("script")]


async def test_a_job_goes_from_acceptance_to_its_one_terminal_event() -> None:
    async with supervised() as supervisor:
        job = await submit(supervisor, request("say a b c"))
        assert (job.prompt_tokens, job.seed) == (3, 7)
        events = await all_of(job)
        assert [type(e) for e in events] == [Started, Token, Token, Token, Finished]
        assert supervisor.status().running == supervisor.status().queued == 0
        assert supervisor.status().last_progress_ms == 0
        assert supervisor.status().stats.kv_cells_total == 64


async def test_a_refusal_is_raised_with_its_numbers() -> None:
    async with supervised() as supervisor:
        error = await failure_of(submit(supervisor, request("refuse")))
        assert isinstance(error, ContextLengthExceeded)
        assert error.details == {"prompt_tokens": 9, "context_length": 8}


async def test_cancel_ends_the_stream_at_once_and_is_idempotent() -> None:
    async with supervised() as supervisor:
        assert supervisor.cancel("j") is False
        job = await submit(supervisor, request("hold"))
        assert supervisor.status().running == 1
        os.kill(engine_pid(supervisor), signal.SIGSTOP)  # nobody waits for its answer
        assert supervisor.cancel("j") is True
        events = await all_of(job)
        os.kill(engine_pid(supervisor), signal.SIGCONT)
        assert isinstance(events[-1], Failed)
        assert isinstance(events[-1].error, Cancelled)
        job.cancel()
        assert supervisor.cancel("j") is True
        assert supervisor.status().running == 0


async def test_a_job_id_is_taken_until_its_job_has_ended() -> None:
    async with supervised() as supervisor:
        first = await submit(supervisor, request("hold"))
        assert isinstance(await failure_of(submit(supervisor, request("hold"))), DuplicateJob)
        first.cancel()
        second = await submit(supervisor, request("say x"))
        assert second.request_id != first.request_id
        assert isinstance((await all_of(second))[-1], Finished)


@pytest.mark.parametrize("settings", [{"slots": 1}, {"slots": 8, "engine_slots": 1}])
async def test_a_full_queue_refuses_with_its_limit_and_a_retry_after(
    settings: dict[str, int],
) -> None:
    """By the number of the engine's slots: an embedder has one, whatever the setting."""
    async with supervised(max_queued_requests=1, **settings) as supervisor:
        await submit(supervisor, request("hold", "a"))
        await submit(supervisor, request("queue", "b"))
        error = await failure_of(submit(supervisor, request("say x", "c")))
        assert isinstance(error, QueueFull)
        assert error.message == "The queue is full: at most 1 request may wait."
        assert error.details["retry_after_seconds"] >= 1


async def test_idle_time_does_not_lengthen_the_retry_after() -> None:
    async with supervised(slots=1, max_queued_requests=1) as supervisor:
        for _ in range(2):
            await all_of(await submit(supervisor, request("say x")))
            await asyncio.sleep(1.2)
        await submit(supervisor, request("hold", "a"))
        await submit(supervisor, request("queue", "b"))
        error = await failure_of(submit(supervisor, request("say x", "c")))
        assert error.details["retry_after_seconds"] == 1


async def test_a_request_of_more_jobs_than_slots_and_queue_is_invalid() -> None:
    async with supervised(slots=1, max_queued_requests=2) as supervisor:
        with pytest.raises(InvalidRequest, match="at most 3 answers"):
            supervisor.open(request("say x", "a"), n_more=3)
        await all_of(supervisor.open(request("say x", "a"), n_more=2))


async def test_room_in_the_queue_is_reserved_for_all_jobs_of_a_request() -> None:
    """Two simultaneous requests of several jobs each had room, and one was then refused midway."""
    async with supervised(slots=1, max_queued_requests=2) as supervisor:
        inbox = Inbox()
        supervisor.open(request("hold", "a"), inbox=inbox, n_more=1)
        with pytest.raises(QueueFull, match="at most 2 requests may wait"):
            supervisor.open(request("queue", "b"), n_more=1)
        supervisor.open(request("queue", "c"))
        with pytest.raises(QueueFull):
            supervisor.open(request("queue", "d"))
        supervisor.open(request("queue", "a-1"), inbox=inbox)
        assert supervisor.cancel("c") and supervisor.cancel("a-1")
        supervisor.open(request("queue", "e"), inbox=(other := Inbox()), n_more=1)
        with pytest.raises(QueueFull):
            supervisor.open(request("queue", "f"))
        supervisor.expect_no_more(other)
        supervisor.open(request("queue", "f"))


async def test_the_queue_is_also_bounded_by_prompt_tokens() -> None:
    async with supervised(max_queued_prompt_tokens=3) as supervisor:
        await submit(supervisor, request("queue", "a"))
        assert supervisor.status().queued_prompt_tokens == 3
        error = await failure_of(submit(supervisor, request("say x", "b")))
        assert isinstance(error, QueueFull)


@pytest.mark.parametrize("order", ["hold", "queue", "ignore"])
async def test_a_deadline_ends_a_request_at_every_stage(order: str) -> None:
    """Even a request that it has not accepted."""
    async with supervised() as supervisor:
        deadline = time.monotonic() + 1
        job = supervisor.open(request(order, deadline=deadline))
        last = (await all_of(job))[-1]
        assert isinstance(last, Failed) and isinstance(last.error, InferenceTimeout)
        assert clock.in_time(deadline, 10)


async def test_concurrent_calls_get_their_own_replies_or_errors() -> None:
    async with supervised() as supervisor:
        first = ask(supervisor, Tokenize("ab"))
        second = ask(supervisor, Tokenize("c"))
        replies = await asyncio.gather(first, second)
        assert list(replies) == [Tokenized(b"ab"), Tokenized(b"c")]
        trouble = ask(supervisor, Tokenize("trouble"))
        assert isinstance(await failure_of(trouble), InferenceFailed)


async def test_a_model_path_that_is_not_utf_8_is_refused() -> None:
    async with unstarted() as supervisor:
        config = replace(CONFIG, model_path="/models/\udcff.gguf")
        error = await failure_of(supervisor.start(config))
    assert isinstance(error, ConfigError) and "not UTF-8" in error.message


@pytest.mark.parametrize(
    ("start", "kind", "words"),
    [
        ("fail", ModelError, "The file is gone."),
        ("die", ModelError, "SIGABRT"),
        ("kill", InsufficientVram, "lack of memory"),
    ],
)
async def test_a_failed_start_is_raised(
    script: Callable[..., None], start: str, kind: type[WorkerError], words: str
) -> None:
    script(start)
    async with unstarted() as supervisor:
        error = await failure_of(supervisor.start(CONFIG))
        assert isinstance(error, kind) and words in error.message
        assert supervisor.state == "failed"


async def test_an_engine_that_dies_after_a_cancelled_start_is_fatal(
    script: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as when a stop of all processes of a service reaches both at once."""
    script("hang")
    async with unstarted() as supervisor:
        starting = asyncio.create_task(supervisor.start(CONFIG))
        await until(lambda: supervisor.status().progress.phase == "load")
        starting.cancel()
        await asyncio.wait({starting})
        pid = supervisor._guardian.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert (await supervisor.fatal).exit_code == 5
    assert "guardian_failed" not in capsys.readouterr().out


async def test_an_engine_that_cannot_be_spawned_is_not_blamed_on_the_model() -> None:
    async with unstarted(["/no/such/program"]) as supervisor:
        n_open = len(os.listdir("/dev/fd"))
        error = await failure_of(supervisor.start(CONFIG))
        assert type(error) is WorkerError and "/no/such/program: No such file" in error.message
        assert len(os.listdir("/dev/fd")) <= n_open, "though its error keeps it"


async def test_progress_is_seen_until_ready_and_nothing_is_accepted_before() -> None:
    async with unstarted() as supervisor:
        assert supervisor.state == "loading"
        assert isinstance(await failure_of(submit(supervisor, request("say x"))), NotReady)
        phases: list[str] = []

        async def watch() -> None:
            async for progress in supervisor.watch_progress():
                phases.append(progress.phase)

        watcher = asyncio.create_task(watch())
        await asyncio.sleep(0)
        await supervisor.start(CONFIG)
        await watcher
        assert phases[0] == "starting" and phases[-1] == "ready"
        assert supervisor.info is not None


async def test_draining_refuses_new_work_and_waits_for_the_old() -> None:
    async with supervised() as supervisor:
        job = await submit(supervisor, request("hold"))
        supervisor.begin_draining()
        assert supervisor.state == "draining"
        refused = await failure_of(submit(supervisor, request("say x", "k")))
        assert isinstance(refused, ShuttingDown)
        drain = asyncio.create_task(supervisor.drain(20))
        await asyncio.sleep(0.05)
        assert not drain.done()
        job.cancel()
        await drain


async def test_progress_of_a_preparation_is_not_a_stall() -> None:
    async with supervised() as supervisor:
        job = supervisor.open(request("ignore"))
        await until(lambda: supervisor.stalled_seconds() > 0.2)
        supervisor.on_events([Preparing(job.request_id)])
        assert supervisor.stalled_seconds() < 0.2
        assert supervisor.status().queued == 1


async def test_native_code_that_makes_progress_is_not_a_stall() -> None:
    """Such as a batch of a large model on few processors. The test writes the pulse itself, so that
    a busy machine delays pulse and supervisor alike."""
    async with supervised(stall_timeout=0.5) as supervisor:
        job = await submit(supervisor, request("hold"))
        first = engine_pid(supervisor)
        for beat in range(90):  # it would end after 1.5 s
            with supervisor._guardian.engine._black_box.pulse_memory(MODEL) as pulse:
                pulse[0] = beat
            assert not supervisor.status().is_stalled
            await asyncio.sleep(0.02)
        assert engine_pid(supervisor) == first and not job.engine_restarts
        await until(lambda: supervisor.status().is_stalled)
        await until(lambda: job.engine_restarts == 1)
