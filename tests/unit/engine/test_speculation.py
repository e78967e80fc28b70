"""Guessed tokens must not change an answer, and must be worth their rows."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.bundled import bundled_gguf
from tests.support.byte_runner import EOG, answer_byte, expected_answer, make_sequence, under
from tests.support.random_models import Kind, random_model
from tests.support.real_engine import CONTEXT as CONTEXT_OF_REAL
from tests.support.real_engine import RealEngine
from tests.unit.engine.test_loop import CONTEXT, Engine, answered_with
from worker.api.chat.constrain.constrain import constrain
from worker.api.chat.request import Choices, JsonSchema
from worker.engine.pace import Pace
from worker.engine.sequence import Sequence
from worker.engine.speculation.draft import DraftModel
from worker.engine.speculation.lookup import Lookup
from worker.engine.speculation.speculation import Drafter, Guess, Speculation
from worker.engine.step import Chunk
from worker.engine.tokens import common_length
from worker.llama.context import Context, ContextOptions
from worker.llama.model import Model
from worker.llama.sampler import Sampler
from worker.wire.messages import DecodeOutcome, Failed, Finished
from worker.wire.sampling import Sampling

STORY = "Once upon a time, there was a brave fox named Otto. Otto loved to sing. One day, Otto went"
LIST = "1, 2, 3, 4, 5, 6, 7, 8. 1, 2, 3, 4, 5, 6, 7, 8. 1, 2, 3, 4, 5, 6, 7, 8. 1, 2, 3,"


class Prophet(Drafter):
    """Guesses right up to a chosen token, and wrong from there on."""

    kinds: Rows[float] = (1.0,)

    def __init__(self, seed: int, *, computes: bool = False) -> None:
        self._random, self.computes = random.Random(seed), computes

    def follow(self, sequence: Sequence) -> bool:
        return self._random.random() < 0.9

    def _next(self, tokens: list[int]) -> int:
        return answer_byte(tokens)

    def guess(self, sequence: Sequence, most: int) -> list[Guess]:
        adapters, tokens = sequence.request.adapters, list(sequence.tokens)
        guesses: list[Guess] = []
        right = self._random.randint(0, most)
        for index in range(most):
            token = self._next(under(adapters, tokens))
            guesses.append(Guess(token if index < right else ord("!"), 0))
            tokens.append(guesses[-1].token)
        return guesses


def guess_always(engine: Engine | RealEngine, dice: random.Random | None = None) -> Speculation:
    """Make an engine try all guesses, or with `dice` a random number of them, whatever they are
    worth and however slow the machine is; returns its speculation."""
    speculation = engine.loop.speculation
    assert speculation is not None
    speculation._worth = lambda chances: (  # type: ignore[method-assign]
        dice.randint(0, len(chances)) if dice else len(chances)
    )
    speculation._book = lambda won: None  # type: ignore[method-assign]
    pace = engine.scheduler.pace
    pace.measured(1, 0, 1.0)
    pace.measured(2, 0, 1.0)  # the second row is free, too
    pace.measured = lambda n_decoding, n_prompt, seconds: None  # type: ignore[method-assign]
    return speculation


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
    st.booleans(),
    st.sampled_from([{}, {"window": 12}, {"recurrent": True, "most_back": 5}]),
)
def test_guesses_do_not_change_answers(
    jobs: list[tuple[bytes, int, int]],
    stop: tuple[str, ...],
    outcomes: list[DecodeOutcome],
    seed: int,
    unified: bool,
    memory: dict[str, Any],
) -> None:
    drafter = Prophet(seed, computes=bool(seed % 2))
    engine = Engine(n_slots=2, unified=unified, drafter=drafter, **memory)
    speculation = guess_always(engine, random.Random(seed))
    engine.runner.outcomes = [o for o in outcomes if not (engine.recurrent and o == "aborted")]
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
    engine = Engine(drafter=Prophet(3))
    guess_always(engine)
    engine.submit(1, answered_with(60, b"a")[0], max_tokens=60)
    engine.run()
    assert engine.stats is not None and engine.stats.tokens_accepted > 20
    assert engine.stats.steps < 45
    assert engine.stats.tokens_drafted >= engine.stats.tokens_accepted


def draft_model(path: Path, batch: int = 64, n_fewer: int = 0) -> DraftModel:
    """Load that file, with room for one sequence; it lives as long as the test session. `n_fewer`
    is the number of tokens at the vocabulary's end that it lacks."""
    model = Model(str(path))
    context = Context(
        model, ContextOptions(n_ctx=CONTEXT_OF_REAL, n_batch=batch, kv_types=("f32", "f32"))
    )
    return DraftModel(context, model.n_vocab - n_fewer)


@pytest.mark.parametrize("batch", [2, 8, 15])
def test_guesses_fit_a_small_batch(plain: RealEngine, batch: int) -> None:
    request = plain.submit(STORY, max_tokens=40)
    plain.run()
    drafter = draft_model(bundled_gguf("f32"), batch=batch)
    engine = RealEngine(slots=2, drafter=drafter, batch=batch, prefill_budget=batch)
    speculation = guess_always(engine)
    again = engine.submit(STORY, max_tokens=40)
    engine.run()
    assert engine.text(again) == plain.text(request)
    assert speculation.n_accepted


def test_a_forbidden_token_may_be_unknown_to_the_draft_model(plain: RealEngine) -> None:
    engine = RealEngine(slots=2, drafter=draft_model(bundled_gguf("f32"), n_fewer=2))
    speculation = guess_always(engine)
    unrestricted = plain.submit(STORY, max_tokens=20)
    plain.run()
    forbidden = (plain.model.n_vocab - 1, *plain.ids(unrestricted)[:3])
    options: dict[str, Any] = {"logit_bias": tuple((token, -math.inf) for token in forbidden)}
    requests = [each.submit(STORY, max_tokens=20, **options) for each in (engine, plain)]
    engine.run()
    plain.run()
    assert engine.ids(requests[0]) == plain.ids(requests[1])
    assert speculation.n_accepted


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": Lookup,
    "itself": lambda: draft_model(bundled_gguf("f32")),
    "another": lambda: draft_model(random_model("dense")),
}


@pytest.fixture(scope="module")
def plain() -> Iterator[RealEngine]:
    engine = RealEngine(slots=2)
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=DRAFTERS)
def guessing(request: pytest.FixtureRequest) -> Iterator[tuple[str, RealEngine]]:
    engine = RealEngine(slots=2, drafter=DRAFTERS[request.param]())
    yield request.param, engine
    engine.close()


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
]


def prompts(count: int) -> list[str]:
    """Return two texts that repeat themselves, then random ones, half of which quote themselves."""
    dice = random.Random(count)
    words = sorted(set(f"{LIST} {STORY}".split()))
    made = [" ".join(dice.choices(words, k=dice.randint(3, 40))) for _ in range(count - 2)]
    return [LIST, STORY, *(f"{text}. {text}" if n % 2 else text for n, text in enumerate(made))]


def same_but_for_ties(
    plain: RealEngine, prompt: str | tuple[int, ...], guessed: list[int], expected: list[int]
) -> bool:
    """Whether an answer equals the plain engine's greedy one, up to the first near tie: rounding
    depends on the rows of a batch."""
    at = common_length(guessed, expected)
    if at == len(expected):
        return True
    ids = plain.prompts.build(prompt) if isinstance(prompt, str) else prompt
    request_id = plain.submit((*ids, *expected[:at]), max_tokens=1, logprobs=2, ignore_eos=True)
    plain.run()
    first, second = plain.logprobs(request_id)[0].top
    return first.logprob - second.logprob < 0.02


def differs_as_drawn(
    engine: RealEngine, plain: RealEngine, prompt: str, n_out: int, sampling: dict[str, Any]
) -> bool:
    """Whether an engine's sampled answer differs from the plain one's, as it may at the boundary of
    two tokens; a greedy answer must not."""
    options = {"max_tokens": n_out, "ignore_eos": True, **sampling}
    guessed, plainly = engine.submit(prompt, **options), plain.submit(prompt, **options)
    engine.run()
    plain.run()
    ids, expected = engine.ids(guessed), plain.ids(plainly)
    assert len(expected) > n_out - 4, "the last ones may have no text yet"
    if "temperature" in sampling:
        return ids != expected
    assert same_but_for_ties(plain, prompt, ids, expected)
    return False


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("count", [2, pytest.param(500, marks=pytest.mark.long)])
def test_guesses_do_not_change_answers_of_llama_cpp(
    plain: RealEngine, guessing: tuple[str, RealEngine], sampling: dict[str, Any], count: int
) -> None:
    drafter, engine = guessing
    speculation = guess_always(engine)
    drafted, accepted = speculation.n_drafted, speculation.n_accepted
    n_rounded = 0
    for prompt in prompts(count):
        for seed in range(2 if sampling else 1):
            n_rounded += differs_as_drawn(engine, plain, prompt, 28, sampling | {"seed": seed})
    assert n_rounded <= 0.01 * count
    n_drafted = speculation.n_drafted - drafted
    assert n_drafted or drafter == "ngram", "where nothing is quoted, nothing is looked up"
    right = (speculation.n_accepted - accepted) / max(n_drafted, 1)
    if drafter == "itself":
        # It ignores penalties and forbidden ends.
        assert right > 0.5
    else:
        assert right < (0.1 if drafter == "another" else 1)


def test_a_long_text_changes_only_at_near_ties(plain: RealEngine) -> None:
    """Different rounding stays in the cells that all later tokens read."""
    engine = RealEngine(slots=1, drafter=Lookup())
    speculation = guess_always(engine)
    guessed, plainly = (e.submit(LIST, max_tokens=400, ignore_eos=True) for e in (engine, plain))
    engine.run()
    plain.run()
    assert len(plain.ids(plainly)) == 400
    assert same_but_for_ties(plain, LIST, engine.ids(guessed), plain.ids(plainly))
    assert speculation.n_accepted > 100


class Foretold(Prophet):
    """Guesses an earlier answer, from wherever a stream is."""

    produced: Rows[int] = ()

    def guess(self, sequence: Sequence, most: int) -> list[Guess]:
        return [Guess(token, 0) for token in self.produced[sequence.n_out :][:most]]


@pytest.mark.parametrize("stop", [("two",), ()])
def test_a_dead_end_after_guesses_fails_only_when_it_is_reached(
    plain: RealEngine, stop: tuple[str, ...]
) -> None:
    """If no token may follow a text, the text is sent before the request fails, or is its end if
    a stop matches."""
    banned = [" nine"[:n].encode() for n in range(1, 6)]
    bias = tuple(
        (id, -math.inf)
        for id in range(plain.model.n_vocab)
        if plain.model.piece(id, special=True) in banned
    )
    options: dict[str, Any] = {
        "constraint": constrain(Choices(("one two nine",), "choices")).constraint,
        "logit_bias": bias,
        "stop": stop,
    }
    drafter = Foretold(0)
    engine = RealEngine(slots=2, drafter=drafter)
    guess_always(engine)
    request = plain.submit(STORY, **options)
    plain.run()
    whole = plain.submit(STORY, **options | {"stop": ()})
    plain.run()
    drafter.produced = [*plain.ids(whole), 1]
    again = engine.submit(STORY, **options)
    engine.run()
    assert engine.text(again) == plain.text(request) == ("one " if stop else "one two")
    assert isinstance(engine.events[again][-1], Finished if stop else Failed)


def test_a_sampler_that_breaks_after_right_guesses_fails_its_request_alone() -> None:
    engine = Engine(unified=True, drafter=Prophet(3))
    speculation = guess_always(engine)
    for request_id in (1, 2):
        engine.submit(request_id, b"a prompt", max_tokens=30, most_given=2 * (request_id == 1))
    engine.turn()
    sampler = engine.loop._sequences[1].sampler
    give = sampler.take_given

    def breaks(most: int) -> list[int]:
        if 1 in speculation._tried:
            raise RuntimeError("broken")
        return give(most)

    sampler.take_given = breaks  # type: ignore[method-assign]
    engine.run()
    assert engine.have_failed(1) and engine.have_finished(2)


@pytest.mark.parametrize("sampling", SAMPLINGS[1:3], ids=str)
@pytest.mark.long
def test_guesses_do_not_change_the_distribution_of_draws(
    plain: RealEngine, guessing: tuple[str, RealEngine], sampling: dict[str, Any]
) -> None:
    """For the third token, by Pearson's two-sample test at one in a thousand."""
    engine = guessing[1]
    guess_always(engine)

    def drawn(engine: RealEngine, seeds: range) -> Counter[int]:
        options = {"max_tokens": 4, "ignore_eos": True, **sampling}
        third: Counter[int] = Counter()
        for seed in seeds:
            request_id = engine.submit(STORY, seed=seed, **options)
            engine.run()
            third[engine.ids(request_id)[2]] += 1
        return third

    one, other = drawn(plain, range(600)), drawn(engine, range(5000, 5600))
    often = [token for token, count in (one + other).items() if count >= 20]
    cells = [(one[token], other[token]) for token in often]
    cells.append((600 - sum(a for a, _ in cells), 600 - sum(b for _, b in cells)))
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells if a + b)
    freedom = len(cells) - 1
    # Wilson and Hilferty's approximation of the quantile.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < bound, cells


def test_cells_of_wrong_guesses_are_not_reused(
    plain: RealEngine, guessing: tuple[str, RealEngine]
) -> None:
    engine = guessing[1]
    guess_always(engine)
    for stop in ((), (" a",)):
        first = engine.generate(STORY, max_tokens=24, stop=stop)
        assert first == plain.generate(STORY, max_tokens=24, stop=stop)
        more = STORY + first + " And then"
        assert engine.generate(more, max_tokens=12) == plain.generate(more, max_tokens=12)


def test_a_draft_model_reads_along_and_keeps_nothing_for_other_tenants() -> None:
    drafter = draft_model(bundled_gguf("f32"))

    def of(request_id: int, n_tokens: int, salt: str | None = None) -> Sequence:
        prompt = bytes(i % 200 for i in range(n_tokens))
        return make_sequence(request_id, prompt, cache_salt=salt)

    long = of(1, 200)
    assert [drafter.follow(long) for _ in range(3)] == [False, False, True], "64 tokens a step"
    assert drafter.follow(of(2, 200)), "the same text is there"
    assert not drafter.follow(of(3, 200, "another")), "but not for another tenant"
    assert not any(drafter.follow(of(4, CONTEXT_OF_REAL)) for _ in range(20)), "it has no room"


def stream(prompt: bytes, n_most: int = 1 << 30, request_id: int = 1, **options: Any) -> Sequence:
    sequence = make_sequence(request_id, prompt, **options)
    sequence.n_most = n_most
    return sequence


def drafted(speculation: Speculation, sequence: Sequence) -> list[int]:
    """Return the guesses for a stream that is alone in its step."""
    n = sequence.n_computed = len(sequence.tokens) - 1
    return speculation.drafts([Chunk(sequence, n, 1)]).get(sequence, [])


class Machine:
    """Computes steps of one stream, on the drafter's clock: `plain` seconds for a plain step, plus
    `row` for each guess."""

    def __init__(self, drafter: SlowLookup | Guesser, plain: float, row: float) -> None:
        self.drafter, self.plain, self.row = drafter, plain, row
        self.pace = Pace(1.0, 8)
        self.speculation = Speculation(drafter, EOG.__eq__, self.pace, 2048, lambda: drafter.now)
        self.pace.measured(1, 0, plain)

    def computes(
        self, sequence: Sequence, draft: list[int], n_right: int, more: float = 0.0
    ) -> None:
        seconds = self.plain + self.row * len(draft) + more
        self.drafter.now += seconds
        self.pace.measured(1 + len(draft), 0, seconds)
        if draft:
            self.speculation.verified({sequence.request_id: n_right}, seconds)


class SlowLookup(Lookup):
    """Lookup whose time the clock shows."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.now, self._seconds = 0.0, seconds

    def follow(self, sequence: Sequence) -> bool:
        self.now += self._seconds
        return super().follow(sequence)


def played(
    row_cost: float, hits: float, n_tokens: int = 1500, to_look: float = 0.0, n_at_first: int = 0
) -> float:
    """Return the tokens in the time of a plain step, on a machine where an additional row costs
    `row_cost` of one, in a text that loops after its first tokens, and leaves the loop again and
    again."""
    machine, dice = Machine(SlowLookup(to_look), 1.0, row_cost), random.Random(1)
    sequence = stream(bytes(range(12)) * 2, 9999)
    text = [
        i % 12 if i >= n_at_first and dice.random() < hits else dice.randrange(12)
        for i in range(n_tokens)
    ]
    at = 0
    while at < n_tokens:
        draft = drafted(machine.speculation, sequence)
        n_right = common_length(draft, text[at : at + len(draft)])
        machine.computes(sequence, draft, n_right)
        sequence.tokens += text[at : at + n_right + 1]
        at += n_right + 1
    return n_tokens / machine.drafter.now


@pytest.mark.parametrize("row_cost", [0.02, pytest.param(0.2, marks=pytest.mark.long), 0.6, 1.2])
@pytest.mark.parametrize("hits", [0.0, 0.2, 0.6])
@pytest.mark.parametrize(("n_tokens", "to_look"), [(1500, 0.0), (1500, 0.1), (6000, 0.002)])
def test_guesses_lose_at_most_half_a_percent_and_six_steps(
    row_cost: float, hits: float, n_tokens: int, to_look: float
) -> None:
    assert played(row_cost, hits, n_tokens, to_look) >= 0.995 - 6 / n_tokens


def test_right_guesses_save_time() -> None:
    assert played(0.1, 0.99) > 2
    assert played(0.2, 0.95) > 1.3
    # Even if a look-up costs more than guesses may lose, as with steps of less than a
    # millisecond. Then the account saves up for a try.
    assert played(0.1, hits=0.97, n_tokens=6000, to_look=0.06, n_at_first=1000) > 1.8


@pytest.mark.parametrize("stops_in", ["a batch", "a look-up"])
def test_guesses_come_back_after_the_process_was_stopped(stops_in: str) -> None:
    """The minute of the stop does not count as their cost."""
    drafter = SlowLookup(0.0)
    machine = Machine(drafter, 0.01, 0.0001)
    sequence = stream(bytes(range(12)) * 2)

    def step(more: float = 0.0) -> int:
        """Return the number of guesses in a step of a looping text; they take almost no time."""
        draft = drafted(machine.speculation, sequence)
        machine.computes(sequence, draft, len(draft), more)
        for _ in range(1 + len(draft)):
            sequence.tokens.append((sequence.tokens[-1] + 1) % 12)
        return len(draft)

    assert sum(step() for _ in range(200)) > 1000
    if stops_in == "a batch":
        step(more=60.0)
    else:
        drafter._seconds = 60.0
        step()
        drafter._seconds = 0.0
    assert any(step() for _ in range(20_000))


class Guesser(Drafter):
    """Guesses the same token repeatedly, on a clock that shows the time for that."""

    kinds: Rows[float] = (0.6,)
    computes = True

    def __init__(self, seconds_to_read: float, seconds_a_guess: float) -> None:
        self.now = 0.0
        self._to_read, self._a_guess = seconds_to_read, seconds_a_guess
        self._request_id = -1

    def follow(self, sequence: Sequence) -> bool:
        self.now += self._to_read * (sequence.request_id != self._request_id)
        self._request_id = sequence.request_id
        return True

    def guess(self, sequence: Sequence, most: int) -> list[Guess]:
        self.now += self._a_guess * most
        return [Guess(7, 0)] * most


def served(to_read: float, a_guess: float, hits: float, n_out: int, n_requests: int = 60) -> float:
    """Return the tokens in the time of a plain step, where an additional row takes 0.2 of one."""
    machine, dice = Machine(Guesser(to_read, a_guess), 1.0, 0.2), random.Random(1)
    for request_id in range(n_requests):
        sequence = stream(b"abc", n_out + 3, request_id)
        while len(sequence.tokens) < sequence.n_most:
            draft = drafted(machine.speculation, sequence)
            right = [dice.random() < hits for _ in draft]
            n_right = (*right, False).index(False)
            machine.computes(sequence, draft, n_right)
            sequence.tokens += [7] * (n_right + 1)
    return n_requests * n_out / machine.drafter.now


@pytest.mark.parametrize("to_read", [0.0, pytest.param(3.0, marks=pytest.mark.long), 30.0])
@pytest.mark.parametrize(("a_guess", "hits"), [(0.1, 0.0), (0.1, 0.3), (0.5, 0.7), (0.9, 0.99)])
@pytest.mark.parametrize("n_out", [8, 200])
def test_a_draft_model_loses_at_most_the_reading_of_a_prompt_more(
    to_read: float, a_guess: float, hits: float, n_out: int
) -> None:
    n_requests = 12_000 // n_out
    assert served(to_read, a_guess, hits, n_out, n_requests) >= 0.995 - (16 + to_read) / 12_000


def test_wrong_guesses_end_after_a_plain_step_that_took_a_minute() -> None:
    """While each step has guesses, no step shows the time of one without."""
    machine = Machine(Guesser(0.0, 0.001), 0.01, 0.002)
    sequence = stream(b"abc")
    machine.pace.measured(1, 0, 60.0)
    tried = []
    for _ in range(2000):
        tried.append(drafted(machine.speculation, sequence))
        machine.computes(sequence, tried[-1], 0)
        sequence.tokens.append(7)
    assert sum(map(bool, tried[1000:])) < 20


def test_a_good_draft_model_saves_time() -> None:
    assert served(2.0, 0.1, 0.9, 200) > 1.4
    assert served(2.0, 0.02, 0.98, 200) > 2


class Known(Drafter):
    """Guesses of one kind, one after the other on request."""

    computes = False

    def __init__(self, chance: float) -> None:
        self.kinds = (chance,)
        self.n_looked_up = 0

    def follow(self, sequence: Sequence) -> bool:
        return True

    def guess(self, sequence: Sequence, most: int) -> Iterator[Guess]:
        for _ in range(most):
            self.n_looked_up += 1
            yield Guess(7, 0)


def worth(chances: list[float], n_streams: int, row: float, account: float) -> int:
    """Return how many of the likeliest guesses give the most tokens a second, if each takes `row`
    of a plain step, counted 1.2 times; the account must cover the loss of a wrong first one.
    """
    rates = [1.0]
    for n in range(1, len(chances) + 1):
        if n * row * (1 - chances[0]) > account:
            break
        rates.append((1 + sum(chances[:n]) / n_streams) / (1 + 1.2 * n * row))
    return rates.index(max(rates))


def looked_up(chance: float, n_streams: int, row: float, most: int) -> int:
    """Return the guesses of a stream, until even right ones after them would not be worth their
    rows. The first one of a single stream is looked up before that check."""
    first = 1 if n_streams == 1 else 0
    for n in range(first, most):
        tokens = sum(chance**k for k in range(1, n + 1))
        gains = (
            tokens + chance**n * (count - n) - 1.2 * n_streams * count * row
            for count in range(n + 1, most + 1)
        )
        if max(gains) <= 0:
            return n
    return most


def priced(n_streams: int, row: float) -> Pace:
    """Return a pace in which each additional row takes `row` of a plain step."""
    pace = Pace(1.0, 8)
    for n_more in (0, 40):
        pace.measured(n_streams + n_more, 0, 0.02 * (1 + n_more * row))
    return pace


def streams(n: int) -> list[Chunk]:
    return [Chunk(stream(b"abc", request_id=request_id), 2, 1) for request_id in range(n)]


@pytest.mark.parametrize("n_streams", [1, 3])
@pytest.mark.parametrize("row", [0.01, 0.07, 0.2, 0.5, 1.1])
@pytest.mark.parametrize("chance", [0.1, 0.4, 0.7, 0.95, 0.98])
def test_the_number_of_guesses_gives_the_most_tokens_a_second(
    chance: float, row: float, n_streams: int
) -> None:
    drafter, pace = Known(chance), priced(n_streams, row)
    speculation = Speculation(drafter, EOG.__eq__, pace, 2048, lambda: 0.0)
    drafts = speculation.drafts(streams(n_streams))
    most = 31 if n_streams == 1 else 7
    n_each = looked_up(chance, n_streams, row, most)
    assert drafter.n_looked_up == n_streams * n_each
    chances = sorted([chance**n for n in range(1, n_each + 1)] * n_streams, reverse=True)
    assert sum(map(len, drafts.values())) == worth(chances, n_streams, row, 2.005)


@pytest.mark.parametrize("n_streams", [1, 3])
def test_while_nothing_is_guessed_the_cost_of_more_rows_is_forgotten_now_and_then(
    n_streams: int,
) -> None:
    pace = priced(n_streams, row=1.1)
    pace.measured(n_streams + 1, 0, 0.042)  # of its own, and not between two others
    speculation = Speculation(Known(0.1), EOG.__eq__, pace, 2048, lambda: 0.0)
    costs = [pace.decode_seconds(n_streams + 1)]
    for _ in range(96):
        assert not speculation.drafts(streams(n_streams))
        costs.append(pace.decode_seconds(n_streams + 1))
    lower = [n for n, (before, after) in enumerate(pairwise(costs), 1) if after < before]
    assert lower == [32, 64, 96]


@pytest.mark.parametrize("row", [0.05, 0.2])
@pytest.mark.parametrize("a_guess", [0.01, 0.1, 0.35])
def test_the_time_of_a_guess_counts_like_that_of_its_row(row: float, a_guess: float) -> None:
    """Both as fractions of a plain step, which takes half a second here."""
    machine = Machine(Guesser(0.0, a_guess / 2), 0.5, row / 2)
    machine.pace.measured(41, 0, (1 + 40 * row) / 2)
    sequence = stream(b"abc")
    first = len(drafted(machine.speculation, sequence))
    chances = [0.6**n for n in range(1, 32)]
    assert first == worth(chances, 1, row, 2.005), "nothing is known of it yet"
    assert machine.speculation.seconds == pytest.approx(first * a_guess / 2)
    assert machine.speculation._account == pytest.approx(2.005 - first * a_guess)
    second = len(drafted(machine.speculation, sequence))
    assert second == worth(chances, 1, row + a_guess, 2.01 - first * a_guess)


def test_beside_forced_tokens_a_guess_is_one_more_row() -> None:
    """The second row is the most expensive on a CPU, and forced tokens have already paid for it."""
    machine = Machine(SlowLookup(0.0), 1.0, 0.1)
    for n_rows, seconds in ((2, 2.0), (3, 2.1), (4, 2.2)):
        machine.pace.measured(n_rows, 0, seconds)
    text = b"what was said is said, what w"
    sequence = stream(text, n_most=len(text) + 2)  # room for one guess
    for n_given, guesses in ((0, {}), (2, {sequence: [ord("a")]})):
        chunk = Chunk(sequence, len(text) - 1 - n_given, 1 + n_given)
        assert machine.speculation.drafts([chunk]) == guesses
    account = machine.speculation._account
    machine.speculation.verified({sequence.request_id: 1}, seconds=60.0)
    assert 0.8 < machine.speculation._account - account < 1, "by the known price of a row"


def test_nothing_is_guessed_for_requests_that_do_not_allow_it() -> None:
    assert Engine(recurrent=True, drafter=Lookup()).loop.speculation is None
    engine = Engine(drafter=Lookup())
    speculation = guess_always(engine)
    text = b"abcabcabcabc"
    assert not drafted(speculation, stream(text, 100, 1, deterministic=True))
    assert not drafted(speculation, stream(text, 100, 3, is_seeded=True))
    assert drafted(speculation, stream(text, 100, 2))


def test_a_long_prompt_is_read_over_several_steps() -> None:
    """No step reads all of it, because that would block the engine's thread for all streams."""
    lookup = Lookup()
    prompt = b"once. " + bytes(range(256)) * 80 + b"once! once"
    sequence = make_sequence(1, prompt)
    found = []
    for _ in range(8):
        lookup.follow(sequence)
        found.append(bytes(guess.token for guess in lookup.guess(sequence, 2)))
    assert found[0] == b". " and found[-1] == b"! ", "what comes first is known first"


def test_a_constrained_answer_is_guessed_up_to_the_next_value(plain: RealEngine) -> None:
    """The text between two values, even if its key is new; in the next answer from its first key
    on."""
    keys = ("name", "street", "city", "country", "number", "colour", "weight", "animal")
    properties: dict[str, Any] = {key: {"type": "string", "maxLength": 9} for key in keys}
    schema = {"type": "object", "properties": properties, "required": list(keys)}
    constraint = constrain(JsonSchema(schema, "schema")).constraint
    sampling = Sampling(seed=1, temperature=0.0, constraint=constraint)
    lookup, steps = Lookup(), []
    for request_id, values in enumerate(("abcdefgh", "qrstuvwx")):
        pairs = (f' "{key}": "{value}"' for key, value in zip(keys, values, strict=True))
        answer = plain.tokens_of("{" + ",".join(pairs) + "}")
        sequence = make_sequence(request_id, b"?")
        sampler = sequence.sampler = Sampler(plain.model, sampling, [], plain.vocabulary)
        n_steps, n_said = 0, 0
        while n_said < len(answer):
            lookup.follow(sequence)
            guesses = [guess.token for guess in lookup.guess(sequence, 31)] if n_said else []
            n_more = 1 + common_length(guesses, answer[n_said:])
            sequence.tokens += answer[n_said : n_said + n_more]
            sampler.follow_produced(answer[n_said : n_said + n_more])
            n_said, n_steps = n_said + n_more, n_steps + 1
        lookup.forget(sequence)
        steps.append(n_steps)
    first, second = steps  # of 64 tokens each
    assert first <= 3.5 * len(keys)
    assert second <= 2.5 * len(keys), "one for what is between two values, one for a value"
    assert not lookup._forms


@pytest.mark.parametrize(("temperature", "batch"), [(0.0, 2048), (0.8, 2048), (0.0, 8)])
def test_several_streams_in_one_pool_are_guessed_for(temperature: float, batch: int) -> None:
    """A step takes the likeliest guesses of all streams, as many as fit into a batch, and each
    stream's text is the same as without."""
    texts = []
    for drafter in (None, Lookup()):
        n_cells = 3 * CONTEXT_OF_REAL
        engine = RealEngine(3, n_cells=n_cells, kv_unified=True, drafter=drafter, batch=batch)
        if drafter is not None:
            guess_always(engine)
        for _ in range(2):  # the second time, the answers are known
            requests = [
                engine.submit(
                    prompt, max_tokens=40, ignore_eos=True, temperature=temperature, seed=n
                )
                for n, prompt in enumerate((LIST, STORY, LIST[3:]))
            ]
            engine.run()
            texts.append([engine.text(each) for each in requests])
        if engine.loop.speculation is not None:
            assert engine.loop.speculation.n_accepted > 60
    assert texts == [texts[0]] * 4


class Reader(Prophet):
    """Knows some texts, and guesses their continuation."""

    def __init__(self) -> None:
        super().__init__(1)
        self.texts: list[list[int]] = []

    def _next(self, tokens: list[int]) -> int:
        n = len(tokens)
        return next((text[n] for text in self.texts if text[:n] == tokens and text[n:]), 0)


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("kind", ["windowed", "experts", "convolved"])
def test_wrong_guesses_are_taken_back_from_every_memory(
    kind: Kind, unified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if new cells replace those that a window has left. No stream is recomputed for it,
    unlike one whose memory cannot be cut."""
    reader = Reader()
    plain, guessing = (
        RealEngine(
            2, path=random_model(kind), kv_unified=unified, drafter=drafter, batch=32, n_back=7
        )
        for drafter in (None, reader)
    )
    speculation = guess_always(guessing)
    monkeypatch.setattr(guessing.cache, "start_over", Mock(side_effect=AssertionError))
    for text in (LIST, STORY):
        prompt = tuple(plain.prompts.build(text))
        for n_out, stop in ((350, ()), (30, ()), (30, (" a", "e")), (30, ())):
            options: dict[str, Any] = {"max_tokens": n_out, "stop": stop, "ignore_eos": True}
            requests = {engine: engine.submit(prompt, **options) for engine in (plain, guessing)}
            plain.run()
            expected = plain.ids(requests[plain])
            reader.texts.append([*prompt, *expected])
            guessing.run()
            assert same_but_for_ties(plain, prompt, guessing.ids(requests[guessing]), expected)
            prompt += tuple(expected[:40])
    assert 0 < speculation.n_accepted < speculation.n_drafted


def test_a_spent_account_rests_until_a_try_is_worth_it() -> None:
    """Once spent, it needs at least half a plain step; the first account may be lower."""
    machine = Machine(SlowLookup(0.0), 1.0, 0.0)
    machine.pace.measured(2, 0, 1.0)
    sequence = stream(b"abcabcabcabc")
    tried = []
    for account in (0.3, -0.1, 0.3, 0.6, 0.3):
        machine.speculation._account = account
        tried.append(bool(drafted(machine.speculation, sequence)))
    assert tried == [True, False, False, True, True]


def test_each_step_adds_to_the_account_and_a_look_up_is_charged() -> None:
    machine = Machine(SlowLookup(0.1), 2.0, 0.0)
    sequence = stream(b"no text comes twice")
    account = machine.speculation._account
    assert not drafted(machine.speculation, sequence)
    assert machine.speculation._account == pytest.approx(account + 0.005 - 0.1 / 2.0)
    machine.speculation._account = 40.0
    drafted(machine.speculation, sequence)
    assert machine.speculation._account == pytest.approx(32 - 0.1 / 2.0), "no more is remembered"


class Recorder(Guesser):
    """Records its calls; its third guess is the end."""

    def __init__(self) -> None:
        super().__init__(0.0, 0.0)
        self.asked: list[int] = []
        self.read_rows: list[tuple[int, int]] = []
        self.forgotten: list[int] = []

    def guess(self, sequence: Sequence, most: int) -> list[Guess]:
        self.asked.append(most)
        return [*super().guess(sequence, most)[:2], Guess(EOG, 0)][:most]

    def read(self, sequence: Sequence, start: int, n_rows: int) -> None:
        self.now += 0.5
        self.read_rows.append((start, n_rows))

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence.request_id)


def test_a_drafter_that_reads_along_is_notified_of_the_end_even_without_a_guess() -> None:
    machine = Machine(Recorder(), 1.0, 0.0)
    assert isinstance(machine.drafter, Recorder)
    sequence = stream(b"abc")
    sequence.slot, sequence.n_computed = 0, 2
    assert machine.speculation.read(Chunk(sequence, 1, 1)) == 0.5, "the seconds that it took"
    machine.speculation.forget(sequence)
    machine.speculation.forget(sequence)
    assert (machine.drafter.read_rows, machine.drafter.forgotten) == ([(1, 2)], [1])
    fixed, ended = stream(b"abc", request_id=2, is_seeded=True), stream(b"abc", request_id=3)
    fixed.slot = 1
    for other in (fixed, ended):
        assert machine.speculation.read(Chunk(other, 1, 1)) == 0.0
        machine.speculation.forget(other)
    assert machine.drafter.forgotten == [1], "it has never heard of these"


def test_nothing_is_guessed_after_an_end_or_a_stream_s_last_token() -> None:
    machine = Machine(Recorder(), 1.0, 0.0)
    assert isinstance(machine.drafter, Recorder)
    machine.pace.measured(2, 0, 1.0)
    machine.speculation._acceptance[0] = 0.99
    sequence = stream(b"abc", n_most=20)
    assert drafted(machine.speculation, sequence) == [7, 7], "the end itself is not tried"
    sequence.n_most = 5
    assert drafted(machine.speculation, sequence) == [7]
    sequence.n_most = 4  # the token drawn from this step is the last
    assert drafted(machine.speculation, sequence) == []
    assert machine.drafter.asked == [16, 1], "of 20 tokens three are there, and one is drawn"


def test_several_streams_have_seven_guesses_each_and_share_the_batch() -> None:
    lookup = SlowLookup(0.0)
    pace = Pace(1.0, 8)
    for n_rows in (1, 2, 40):
        pace.measured(n_rows, 0, 1.0)
    for batch, most in ((2048, [7, 7]), (9, [3, 4]), (6, [2, 2]), (3, [1])):
        speculation = Speculation(lookup, EOG.__eq__, pace, batch, lambda: lookup.now)
        both = (stream(bytes(range(20)) * 2, 999, request_id) for request_id in (1, 2))
        chunks = [Chunk(sequence, 39, 1) for sequence in both]
        drafts = speculation.drafts(chunks)
        assert sorted(map(len, drafts.values())) == most
