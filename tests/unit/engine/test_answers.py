"""The text of a token is looked up once, and a token is sent once its text begins to be."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.support.byte_runner import ByteRunner, make_sequence
from tests.unit.engine.test_loop import Engine
from worker.engine.answers import Answers
from worker.wire.messages import Event, Finished, Token

STOPS = ("ab", "bcd", "ca!", "a!", "c!", "d?d")


def test_a_stream_with_stops_looks_each_token_up_once() -> None:
    engine = Engine()
    looked_up: list[int] = []
    piece = engine.runner.piece

    def counted(token: int, shown: tuple[str, ...] = ()) -> bytes:
        looked_up.append(token)
        return piece(token, shown)

    engine.runner.piece = counted  # type: ignore[method-assign]
    engine.submit(1, b"hello", max_tokens=60, stop=("never",))
    engine.run()
    assert len(engine.text(1)) > 26, "some letters came twice"
    assert len(looked_up) == len(set(looked_up))


def test_the_tokens_of_a_stop_that_the_end_completes_come_with_the_end() -> None:
    """The answer ends within a character, while another stop holds back the text before."""
    sequence = make_sequence(1, b"hello", stop=("abc", "b\ufffd"), logprobs=0)
    sequence.n_most, sequence.started_at, sequence.first_token_at = 100, 0.0, 0.0
    answers, events = Answers(ByteRunner(1, 100, 100, 10)), list[Event]()
    for token in b"ab\xe2":
        assert answers.take(sequence, 0, token, events) is None
    answers.finish(sequence, "EOS", None, 1.0, events)
    first, end = events
    assert isinstance(first, Token)
    assert isinstance(end, Finished)
    assert (first.text, first.token_ids, end.token_ids) == ("a", tuple(b"a"), tuple(b"b\xe2"))
    assert len(first.logprobs) == 1
    assert not end.logprobs


def test_a_token_that_is_held_back_does_not_come_with_the_text_before_it() -> None:
    """Its text may begin a stop, and what a stop cuts off is no part of the answer."""
    sequence = make_sequence(1, b"hello", stop=("k!", "ab"), logprobs=0)
    sequence.n_most = 100
    answers, events = Answers(ByteRunner(1, 100, 100, 10)), list[Event]()
    ends = [answers.take(sequence, 0, token, events) for token in b"kab"]
    assert ends == [None, None, ("STOP_SEQUENCE", "ab")]
    (sent,) = events
    assert isinstance(sent, Token)
    assert (sent.text, sent.token_ids, len(sent.logprobs)) == ("k", tuple(b"k"), 1)


def sent(
    drawn: Sequence[int],
    before: Sequence[Token] = (),
    *,
    stop: tuple[str, ...] = STOPS,
    is_replayed: bool = False,
) -> list[Token]:
    """Return the events of an answer with these tokens, of which `before` came from engines that
    died."""
    produced = tuple(token for event in before for token in event.token_ids)
    said = () if is_replayed else produced
    n_chars = sum(len(event.text) for event in before)
    sequence = make_sequence(1, b"hello", stop=stop, produced=said, sent_chars=n_chars)
    sequence.n_most, sequence.slot = sequence.n_prompt + len(drawn), 0
    runner, events = ByteRunner(1, 100, 100, 10), list[Event]()
    answers = Answers(runner)
    sequence.follow_produced(runner.piece)
    for token in drawn[len(said) :]:
        for each in answers.take_plain([(sequence, 0, token)], events):
            if answers.take(*each, events) is not None:
                sequence.slot = None
    sent = [event for event in events if isinstance(event, Token)]
    if is_replayed:  # as the API process does
        n_again = len(produced)
        while n_again > 0:
            n_again -= len(sent.pop(0).token_ids)
    return [*before, *sent]


@pytest.mark.parametrize("is_replayed", [False, True])
@pytest.mark.parametrize("stop", [STOPS, ()])
def test_an_engine_that_takes_over_after_any_event_sends_the_rest(
    stop: tuple[str, ...], is_replayed: bool
) -> None:
    choose, n_held = random.Random(1), 0
    for _ in range(300):
        drawn = choose.choices("abcdé!?".encode(), k=12)
        whole = sent(drawn, stop=stop)
        for n_events in range(len(whole)):
            rest = sent(drawn, whole[:n_events], stop=stop, is_replayed=is_replayed)
            assert rest == whole
            n_held += rest[n_events].token_ids == ()
    assert n_held > 20 or not stop, "text that a later token released"
