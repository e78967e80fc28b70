"""The supervisor when its engine dies or stands still at chosen moments.

The real engine is killed in `tests/system/worker`; here it dies between two given frames.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.supervised import (
    all_of,
    ask,
    engine_pid,
    failure_of,
    kill_engine,
    request,
    submit,
    supervised,
    until,
)
from worker.errors import (
    Cancelled,
    CrashLoop,
    EngineCrashed,
    InvalidRequest,
    NotReady,
    ResidencyViolation,
)
from worker.supervisor.job import Inbox, Job, Stage, StreamEvent
from worker.supervisor.supervisor import Supervisor
from worker.wire.messages import (
    Accepted,
    EndReasoning,
    Failed,
    Finished,
    Started,
    Stats,
    Submit,
    Token,
)
from worker.wire.sampling import Sampling
from worker.wire.work import ChatPrompt, InferenceRequest, Tokenize

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("script")]


def text_of(events: list[StreamEvent]) -> str:
    return " ".join(event.text for event in events if isinstance(event, Token))


async def next_token(job: Job) -> list[StreamEvent]:
    """Read the job's events up to its next token."""
    events: list[StreamEvent] = []
    while not any(isinstance(event, Token) for event in events):
        events += await anext(job.inbox)
    return events


async def test_a_crash_ends_no_stream_and_loses_no_waiting_request() -> None:
    async with supervised() as supervisor:
        stream = await submit(supervisor, request("tell a b", "a"))
        other = await submit(supervisor, request("tell c d e", "b"))
        first = await next_token(stream)
        events = {"a": first, "b": await next_token(other)}
        waiting = await submit(supervisor, request("queue", "c"))
        unread = asyncio.create_task(submit(supervisor, request("ignore", "d")))
        question = asyncio.create_task(ask(supervisor, Tokenize("silence")))
        await until(lambda: supervisor.status().queued == 3)
        first_pid = engine_pid(supervisor)
        await asyncio.sleep(0.05)
        await kill_engine(supervisor)
        assert isinstance(await failure_of(submit(supervisor, request("say x"))), NotReady)
        await until(lambda: supervisor.state == "ready")
        assert engine_pid(supervisor) != first_pid
        events["a"] += await all_of(stream)
        assert [type(e) for e in events["a"]] == [Started, Token, Token, Finished]
        assert text_of(events["a"]) == "a b" and stream.engine_restarts == 1
        events["b"] += await next_token(other)
        assert text_of(events["b"]) == "c d"
        assert supervisor.status().queued == 3 and supervisor.status().running == 1
        assert waiting.engine_restarts == 0, "it had no engine yet"
        for each in (other, waiting):
            each.cancel()
        supervisor.cancel("d")
        assert isinstance(await failure_of(unread), Cancelled)
        question.cancel()


async def test_later_jobs_of_a_request_are_accepted_except_in_quarantine() -> None:
    async with supervised() as supervisor:
        inbox = Inbox()
        first = supervisor.open(request("hold", "a"), inbox=inbox)
        await until(lambda: first.has_slot)
        await kill_engine(supervisor)
        other = supervisor.open(request("say x", "b"), inbox=inbox)
        await until(lambda: other.has_ended)
        assert text_of(inbox.events) == "x"
        supervisor.begin_draining()
        last = supervisor.open(request("say y", "c"), inbox=inbox)
        await until(lambda: last.has_ended)
        assert text_of(inbox.events) == "x y"
        for _ in range(2):
            supervisor._quarantine.blame([request("say z", "d")])
        with pytest.raises(InvalidRequest):
            supervisor.open(request("say z", "d"), inbox=inbox)
        first.cancel()


async def test_a_stream_without_an_engine_is_reported_as_waiting_without_computed_tokens() -> None:
    async with supervised() as supervisor:
        stream = await submit(supervisor, request("tell a b"))
        await next_token(stream)
        stream.cached_tokens = 2
        (now,) = supervisor.activities(9)
        assert (now.doing, now.cached_tokens, now.computed_tokens) == ("decoding", 2, 3)
        await kill_engine(supervisor)
        await until(lambda: supervisor.activities(9)[0].doing == "waiting")
        (now,) = supervisor.activities(9)
        assert (now.cached_tokens, now.computed_tokens) == (0, 0)
        assert (now.prompt_tokens, now.tokens_out) == (3, 1)
        stream.cancel()


async def test_a_stream_survives_as_many_crashes_as_the_setting_says() -> None:
    async with supervised(survive_crashes=2, crash_window=0.01) as supervisor:
        stream = await submit(supervisor, request("tell a b c d e f"))
        text = ""
        for letter in "abc":
            text = text_of(await next_token(stream))
            assert text == letter, "each token once"
            await kill_engine(supervisor)
            if letter != "c":
                await until(lambda: supervisor.state == "ready")
        last = (await all_of(stream))[-1]
        assert isinstance(last, Failed) and isinstance(last.error, EngineCrashed)
        assert last.error.retriable


async def test_tokens_that_a_deterministic_stream_repeats_are_not_forwarded() -> None:
    async with supervised() as supervisor:
        stream = await submit(supervisor, request("tell a b", deterministic=True))
        events = await next_token(stream)
        await kill_engine(supervisor)
        await until(lambda: supervisor.state == "ready")
        # The engine repeats its first word, which is not forwarded.
        await until(lambda: stream.stage == Stage.PRODUCING)
        stream.cancel()
        events += await all_of(stream)
        assert [type(e) for e in events] == [Started, Token, Failed]


async def test_reasoning_ends_only_after_what_a_deterministic_stream_repeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer would differ from what was sent, and the request would fail."""
    async with supervised() as supervisor:
        sent: list[Any] = []
        monkeypatch.setattr(supervisor._guardian.engine, "send", sent.append)
        job = supervisor.open(request("hold", deterministic=True))
        accepted, started, token = Accepted(1, 4), Started(1, 0), Token(1, "a", (5,))
        supervisor.on_events([accepted, started, token])
        supervisor.on_lost(EngineCrashed("It died."), frozenset({99}))
        supervisor.on_events([Stats()])
        supervisor.on_events([accepted, started])
        assert supervisor.end_reasoning("j")
        assert [type(each) for each in sent] == [Submit, Submit]
        supervisor.on_events([token])
        assert sent[2:] == [EndReasoning(1)] and not job.has_ended
        job.cancel()


async def test_a_request_that_crashes_the_engine_ends_alone_and_is_quarantined() -> None:
    async with supervised() as supervisor:
        neighbours = [await submit(supervisor, request("tell a b c d e f", name)) for name in "xyz"]
        for each in neighbours:
            await next_token(each)
        poison = await submit(supervisor, request("abort", "p"))
        last = (await all_of(poison))[-1]
        assert isinstance(last, Failed) and isinstance(last.error, EngineCrashed)
        await until(lambda: supervisor.state == "ready")
        for each in neighbours:
            events = await next_token(each)
            while len(text_of(events).split()) < 2:
                events += await next_token(each)
            assert text_of(events) == "b c", "one word of each engine"
            assert (each.crashes_spent, each.engine_restarts) == (0, 2)
        refused = await failure_of(submit(supervisor, request("abort", "q")))
        assert isinstance(refused, InvalidRequest)
        assert refused.details["errors"][0]["constraint"] == "quarantine"


async def test_equal_requests_are_suspected_once_of_a_crash_and_end_together() -> None:
    """Such as the choices of one request, or the same request of several clients."""
    async with supervised() as supervisor:
        twins = [await submit(supervisor, request("hold", name)) for name in "ab"]
        await until(lambda: supervisor.status().running == 2)
        await kill_engine(supervisor)
        await until(lambda: supervisor.status().running == 1)
        assert not any(job.has_ended for job in twins)
        await kill_engine(supervisor)
        for job in twins:
            assert isinstance((await all_of(job))[-1], Failed)
        await until(lambda: supervisor.state == "ready")
        assert len(supervisor.status().crashes) == 2, "the other one is not tried as well"


async def test_a_request_that_crashes_its_reader_does_not_end_the_worker() -> None:
    async with supervised(crash_limit=5) as supervisor:
        waiting = [asyncio.create_task(submit(supervisor, request("say x", "w")))]
        error = await failure_of(submit(supervisor, request("abort-unread")))
        assert isinstance(error, EngineCrashed)
        await until(lambda: supervisor.state == "ready")
        assert not supervisor.fatal.done()
        again = await failure_of(submit(supervisor, request("abort-unread")))
        assert isinstance(again, InvalidRequest)
        assert isinstance((await all_of(await waiting[0]))[-1], Finished)


async def test_a_request_that_is_answered_is_no_longer_suspected() -> None:
    async with supervised(crash_limit=9) as supervisor:
        for _ in range(2):
            supervisor._quarantine.blame([Tokenize("a b")])
            assert await ask(supervisor, Tokenize("a b"))


async def test_the_only_request_is_blamed_if_the_black_box_names_none() -> None:
    async with supervised(crash_limit=5) as supervisor:
        error = await failure_of(submit(supervisor, request("abort-unnoted")))
        assert isinstance(error, EngineCrashed)
        await until(lambda: supervisor.state == "ready")
        assert not supervisor.fatal.done()


async def test_an_engine_that_sends_a_malformed_frame_is_replaced_and_streams_continue(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with supervised() as supervisor:
        stream = await submit(supervisor, request("tell a b", "a"))
        events = await next_token(stream)
        pid = engine_pid(supervisor)
        bad = asyncio.create_task(failure_of(submit(supervisor, request("nonsense", "n"))))
        events += await all_of(stream)
        assert [type(e) for e in events] == [Started, Token, Token, Finished]
        assert engine_pid(supervisor) != pid
        supervisor.cancel("n")
        await bad
    assert "sent a malformed frame" in capsys.readouterr().out


async def test_a_request_that_cannot_be_encoded_is_refused_alone() -> None:
    async with supervised() as supervisor:
        deep: Any = {}
        for _ in range(100_000):
            deep = {"a": deep}
        chat = ChatPrompt(({"role": "user", "content": deep},))
        work = InferenceRequest("deep", chat, Sampling(seed=1), max_tokens=8)
        error = await failure_of(submit(supervisor, work))
        assert isinstance(error, InvalidRequest)
        assert supervisor.status().queued == 0 and supervisor.status().last_progress_ms == 0
        assert isinstance((await all_of(await submit(supervisor, request("say x"))))[-1],
                          Finished)  # fmt: skip


async def test_a_crash_loop_is_fatal_and_fails_waiting_requests(
    script: Callable[..., None],
) -> None:
    script("ok", "die", "fail", "die")

    async with supervised(crash_limit=2) as supervisor:
        waiting = await submit(supervisor, request("queue", "b"))
        pid = engine_pid(supervisor)
        os.kill(pid, signal.SIGSEGV)
        error = await supervisor.fatal
        assert isinstance(error, CrashLoop) and error.exit_code == 8
        assert error.details["crashes"] == 3
        assert supervisor.state == "failed"
        last = (await all_of(waiting))[-1]
        assert isinstance(last, Failed) and isinstance(last.error, EngineCrashed)
        assert last.error.retriable, "another worker may compute it"


async def test_a_guardian_that_fails_is_fatal(capsys: pytest.CaptureFixture[str]) -> None:
    async def broken() -> None:
        raise RuntimeError("no such state")

    async with supervised() as supervisor:
        supervisor._guardian.run(broken())
        error = await supervisor.fatal
        assert isinstance(error, CrashLoop) and "no such state" in error.message
        assert supervisor.state == "failed"
    assert "engine.guardian_failed" in capsys.readouterr().out


def lost(supervisor: Supervisor) -> str | None:
    return supervisor.status().residency_lost


async def test_a_lost_device_is_fatal_but_lets_running_streams_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.supervisor.supervisor.RESIDENCY_SECONDS", 0.1)

    async with supervised() as supervisor:
        running = await submit(supervisor, request("hold", "a"))
        await asyncio.sleep(0.3)
        assert lost(supervisor) is None and supervisor.state == "ready"
        (tmp_path / "script.gone").touch()
        error = await supervisor.fatal
        assert isinstance(error, ResidencyViolation) and error.exit_code == 5
        assert lost(supervisor) == "CUDA0 is gone."
        assert isinstance(await failure_of(submit(supervisor, request("say x"))), NotReady)
        assert supervisor.status().running == 1, "what runs may finish"
        running.cancel()
