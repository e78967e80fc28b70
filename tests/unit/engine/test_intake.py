"""The intake on the bundled model: whatever a request contains affects only that request."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import clock
from tests.support.real_engine import RealEngine
from tests.unit.engine.test_spans import FakeMedia
from worker.engine.intake import LONG_WORK, Intake
from worker.engine.text.chat_template import ChatTemplate
from worker.engine.text.prompt import PromptBuilder
from worker.errors import Cancelled, InferenceFailed, InvalidRequest
from worker.llama.sampler import Sampler
from worker.wire import transport
from worker.wire.black_box import BlackBox
from worker.wire.messages import Accepted, Answered, Cancel, Event, Failed, Preparing, Submit
from worker.wire.sampling import Sampling
from worker.wire.transport import encode
from worker.wire.work import ChatPrompt, CountPrompt, InferenceRequest, Medium, Tokenize

TEMPLATE = "{% for m in messages %}{{ m.content.strip() }}{% endfor %}"


class Front:
    """An intake whose loop does not run, and the events that it has sent."""

    def __init__(self) -> None:
        self.engine = RealEngine()
        self.sent: queue.SimpleQueue[Event] = queue.SimpleQueue()
        template, media = ChatTemplate(TEMPLATE, {}), FakeMedia([(1, 2)]).reader
        self.intake = Intake(
            self.engine.loop,
            PromptBuilder(self.engine.model, template, 10**6, media=media),
            self.send,
            make_sampler=self.make_sampler,
            pool=None,
            prove_residency=lambda: 1 / 0,  # type: ignore[arg-type]
            kv_unified=False,
            scored_rows=64,
            takes_snapshots=True,
            black_box=BlackBox(),
        )

    def send(self, events: list[Event]) -> None:
        for event in events:
            self.sent.put(event)

    def make_sampler(self, sampling: Sampling, prompt: list[int]) -> Sampler:
        return Sampler(self.engine.model, sampling, prompt, self.engine.vocabulary)

    def submit(self, request_id: int, prompt: Any) -> None:
        request = InferenceRequest(str(request_id), prompt, Sampling(seed=1), 4)
        self.intake.handle(Submit(request_id, request))

    def next(self) -> Event:
        return self.sent.get(timeout=30)

    def until(self, request_id: int, kind: type[Event]) -> list[Event]:
        """Return the events of a request up to one of this kind."""
        events: list[Event] = []
        while not (events and isinstance(events[-1], kind)):
            if getattr(event := self.next(), "request_id", None) == request_id:
                events.append(event)
        return events


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    front = Front()
    yield front
    # Wait until the thread for long texts has finished a cancelled one.
    front.intake.handle(Submit(99, Tokenize("x" * 2 * LONG_WORK)))
    while getattr(front.next(), "request_id", None) != 99:
        pass
    front.engine.close()


def chat(content: Any) -> ChatPrompt:
    return ChatPrompt(({"role": "user", "content": content},))


def test_an_invalid_prompt_fails_its_request_alone(front: Front) -> None:
    front.submit(1, chat("\ud800"))
    refused = front.next()
    assert isinstance(refused, Failed) and isinstance(refused.error, InvalidRequest), refused
    front.submit(2, "fine")
    assert isinstance(front.next(), Accepted)


def test_an_internal_error_fails_the_request_and_not_the_engine(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(front.intake, "_make_sampler", lambda sampling, prompt: 1 / 0)
        front.submit(3, "fine")
        failed = front.next()
    assert isinstance(failed, Failed) and isinstance(failed.error, InferenceFailed)
    front.submit(4, "fine")
    assert isinstance(front.next(), Accepted)


def test_long_texts_delay_nobody_and_a_cancel_overtakes_them(front: Front) -> None:
    front.intake.handle(Submit(5, Tokenize("<|im_end|> and so on\n" * 40_000)))
    front.intake.handle(Submit(6, Tokenize("hello " * 20_000)))
    began = time.monotonic()
    front.submit(7, "a short one")
    first = front.next()
    assert isinstance(first, Accepted) and first.request_id == 7
    front.intake.handle(Cancel(6))
    cancelled = front.next()
    assert isinstance(cancelled, Failed) and isinstance(cancelled.error, Cancelled)
    assert cancelled.request_id == 6
    front.intake.handle(Cancel(5))
    assert isinstance(front.next(), Failed)
    front.intake.handle(Submit(8, Tokenize("hello " * 2_000)))
    answered = front.next()
    assert isinstance(answered, Answered) and answered.request_id == 8
    assert clock.in_time(began, 30)


@pytest.mark.parametrize("counts", [False, True])
def test_a_prompt_of_many_media_reports_progress(front: Front, counts: bool) -> None:
    """Decoding all of them may take longer than the stall timeout."""
    sounds = tuple(Medium("audio", bytes([n]) * 9, f"messages[0].content[{n}]") for n in range(3))
    prompt = ChatPrompt(({"role": "user", "content": [{"type": "audio"}] * 3},), media=sounds)
    if counts:
        front.intake.handle(Submit(10, CountPrompt(prompt)))
        *moves, _ = front.until(10, Answered)
    else:
        front.submit(9, prompt)
        *moves, _ = front.until(9, Accepted)
    assert len(moves) >= 3 and {type(each) for each in moves} == {Preparing}


def test_an_answer_that_is_too_large_for_a_frame_fails_its_request(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = front.intake._send

    def encoded(events: list[Event]) -> None:
        encode(events)
        send(events)

    monkeypatch.setattr(front.intake, "_send", encoded)
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 1000)
    front.intake.handle(Submit(11, Tokenize("hello " * 2_000)))
    (failed,) = front.until(11, Failed)
    assert isinstance(failed, Failed) and isinstance(failed.error, InferenceFailed)
