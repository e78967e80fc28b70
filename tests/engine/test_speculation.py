"""Guessed tokens: nothing about an answer may change by them, and they must be worth their rows."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.byte_backend import EOG, answer_byte, expected_answer, make_sequence
from tests.engine.real_engine import RealEngine
from tests.engine.test_loop import CONTEXT, Engine
from worker.engine.pace import Pace
from worker.engine.sequence import Sequence
from worker.engine.speculation import MOST_GUESSES, Speculation
from worker.wire.messages import DecodeOutcome, Finished

STORY = "Once upon a time, there was a brave fox named Otto. Otto loved to sing. One day, Otto went"
LIST = "1, 2, 3, 4, 5, 6, 7, 8. 1, 2, 3, 4, 5, 6, 7, 8. 1, 2, 3, 4, 5, 6, 7, 8. 1, 2, 3,"


class Guessing(Speculation):
    """Guesses right up to a chosen token, and wrong from there on."""

    def __init__(self, engine: Engine, seed: int) -> None:
        super().__init__(engine.backend.is_eog, Pace(1.0, 8))
        self._random = random.Random(seed)

    def draft(self, sequence: Sequence) -> list[int]:
        if sequence.request.deterministic:
            return []
        tokens = list(sequence.tokens)
        room = min(MOST_GUESSES, sequence.n_most - len(tokens) - 1)
        guesses: list[int] = []
        right = self._random.randint(0, MOST_GUESSES)
        for index in range(room):
            token = answer_byte(tokens)
            if token == EOG:
                break
            guesses.append(token if index < right else ord("!"))
            tokens.append(guesses[-1])
        return guesses


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.tuples(st.binary(min_size=1, max_size=60), st.integers(1, 40), st.integers(0, 9)),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([(), ("ab",), ("e", "zq", "a")]),
    st.lists(st.sampled_from(["ok", "ok", "no_room", "aborted"]), max_size=30),
    st.integers(0, 1000),
)
def test_answers_are_what_they_are_without_guesses(
    jobs: list[tuple[bytes, int, int]],
    stop: tuple[str, ...],
    outcomes: list[DecodeOutcome],
    seed: int,
) -> None:
    engine = Engine(n_slots=2, speculates=True)
    engine.scheduler.speculation = speculation = Guessing(engine, seed)
    engine.backend.outcomes = list(outcomes)
    for request_id, (prompt, max_tokens, pause) in enumerate(jobs):
        engine.submit(request_id, prompt, max_tokens=max_tokens, stop=stop)
        for _ in range(pause):
            engine.turn()
    engine.run()
    for request_id, (prompt, max_tokens, _) in enumerate(jobs):
        engine.check_order(request_id)
        expected = expected_answer(prompt, max_tokens, CONTEXT).decode()
        ends = [expected.index(each) for each in stop if each in expected]
        end = engine.end(request_id)
        if isinstance(end, Finished):
            assert engine.text(request_id) == expected[: min(ends, default=len(expected))]
        else:
            assert "no_room" in outcomes
    assert speculation.n_accepted <= speculation.n_drafted
    engine.check_idle()


def test_right_guesses_bring_several_tokens_a_step() -> None:
    engine = Engine(speculates=True)
    engine.scheduler.speculation = Guessing(engine, 3)
    prompt = next(
        p for p in (bytes([i]) * 5 for i in range(99)) if len(expected_answer(p, 60, CONTEXT)) == 60
    )
    engine.submit(1, prompt, max_tokens=60)
    engine.run()
    assert engine.stats is not None and engine.stats.tokens_accepted > 20
    assert engine.stats.steps < 45
    assert engine.stats.tokens_drafted >= engine.stats.tokens_accepted


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[RealEngine, RealEngine]]:
    plain, guessing = RealEngine(slots=2), RealEngine(slots=2, speculates=True)
    yield plain, guessing
    plain.close()
    guessing.close()


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
        {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    ],
    ids=str,
)
def test_llama_cpp_says_the_same_with_guesses(
    engines: tuple[RealEngine, RealEngine], sampling: dict[str, float]
) -> None:
    plain, guessing = engines
    speculation = guessing.scheduler.speculation
    assert speculation is not None
    speculation._worth = lambda acceptance, most: most  # type: ignore[method-assign]
    for prompt in (LIST, STORY):
        for seed in range(6):
            options = {"max_tokens": 40, "seed": seed, "ignore_eos": True, **sampling}
            assert guessing.generate(prompt, **options) == plain.generate(prompt, **options)
    assert 0 < speculation.n_accepted < speculation.n_drafted


def test_what_a_guess_left_behind_is_not_used_again(
    engines: tuple[RealEngine, RealEngine],
) -> None:
    plain, guessing = engines
    for stop in ((), (" 6",), ("7, 8.",)):
        first = guessing.generate(LIST, max_tokens=30, stop=stop)
        assert first == plain.generate(LIST, max_tokens=30, stop=stop)
        more = LIST + first + " And then"
        assert guessing.generate(more, max_tokens=12) == plain.generate(more, max_tokens=12)


def played(row_cost: float, hits: float, n_tokens: int = 1500) -> float:
    """Tokens in the time of a plain step, on a machine where a row more takes `row_cost` of one, in
    a text that goes in a circle and leaves it again and again."""
    pace, dice = Pace(1.0, 8), random.Random(1)
    pace.measured(1, 0, 1.0)
    engine = Engine()
    sequence = make_sequence(engine.backend, 1, bytes(range(12)) * 2, max_tokens=9999)
    sequence.n_most = 9999
    speculation = Speculation(engine.backend.is_eog, pace)
    text = [i % 12 if dice.random() < hits else dice.randrange(12) for i in range(n_tokens)]
    at, seconds = 0, 0.0
    while at < n_tokens:
        draft = speculation.draft(sequence)
        n_right = 0
        while n_right < len(draft) and text[at + n_right : at + n_right + 1] == [draft[n_right]]:
            n_right += 1
        step = 1.0 + row_cost * len(draft)
        if draft:
            speculation.verified(sequence, len(draft), n_right, step)
        seconds += step
        sequence.tokens += text[at : at + n_right + 1]
        at += n_right + 1
    return n_tokens / seconds


@pytest.mark.parametrize("row_cost", [0.02, 0.2, 0.6, 1.2])
@pytest.mark.parametrize("hits", [0.0, 0.2, 0.6])
def test_guesses_never_lose(row_cost: float, hits: float) -> None:
    assert played(row_cost, hits) >= 0.97


def test_guesses_that_are_right_win() -> None:
    assert played(0.1, 0.99) > 2
    assert played(0.2, 0.95) > 1.3


def test_nothing_is_guessed_where_it_cannot_be() -> None:
    recurrent = Engine(recurrent=True, speculates=True)
    assert recurrent.scheduler.speculation is None
    windowed = Engine(window=12, speculates=True)
    assert windowed.scheduler.speculation is None
    engine = Engine(speculates=True)
    assert (speculation := engine.scheduler.speculation) is not None
    alone = make_sequence(engine.backend, 1, b"abcabcabcabc", deterministic=True)
    alone.n_most = 100
    assert not speculation.draft(alone)
