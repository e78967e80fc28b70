"""Text that a constraint forces is inserted into the stream; nothing else about an answer
changes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.real_engine import CONTEXT, RealEngine
from tests.unit.engine.test_speculation import guess_always
from worker.api.chat.constrain.constrain import constrain
from worker.api.chat.request import Choices, ForcedCalls, JsonSchema, Tool
from worker.engine.speculation.lookup import Lookup
from worker.llama.sampler import Sampler
from worker.wire.sampling import Constraint

PROMPT = "<|im_start|>user\nDescribe {}.<|im_end|>\n<|im_start|>assistant\n"
NAMES = ("identifier", "first_name", "temperature", "is_active", "city", "n", "address", "kinds")
VALUES: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 0, "maximum": 999},
    {"type": "boolean"},
    {"enum": ["north", "north-east", "south"]},
    {"type": "string", "maxLength": 8},
    {"const": "a text that is given as a whole"},
    {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 3},
]


COUNTS = [14, pytest.param(500, marks=pytest.mark.long)]
"""Number of constraints to compare; two of each seven are not schemas."""


def schema(seed: int) -> dict[str, Any]:
    dice = random.Random(seed)
    names = dice.sample(NAMES, dice.randint(1, 6))
    properties = {name: dice.choice(VALUES) for name in names}
    return {"type": "object", "properties": properties, "required": names}


def constraint(seed: int) -> Constraint:
    """Return a schema, or with some seeds a choice or a forced call."""
    if seed % 7 == 1:
        choices = ("the first choice", "the second choice", "none of them")
        return constrain(Choices(choices, "choices")).constraint
    if seed % 7 == 2:
        tool = Tool("describe_station", parameters=schema(seed), path="tools[0]")
        return constrain(ForcedCalls((tool,), several=False)).constraint
    return constrain(JsonSchema(schema(seed), "schema")).constraint


def drawing(seed: int, temperature: float) -> dict[str, Any]:
    wanted = {"temperature": temperature, "seed": seed, "max_tokens": 150}
    return wanted | {"constraint": constraint(seed)}


def submitted(engine: RealEngine, seed: int, temperature: float, **options: Any) -> int:
    prompt = PROMPT.format("a house, a river, a fox, a story".split(", ")[seed % 4])
    return engine.submit(prompt, **(drawing(seed, temperature) | options))


def drawn(engine: RealEngine, seed: int, temperature: float, **options: Any) -> int:
    """Submit the same request with every token sampled; returns its id."""

    def free(self: Sampler, *args: Any) -> None:
        made(self, *args)
        self._may_force = self.may_give = False

    made = Sampler.__init__
    with patch.object(Sampler, "__init__", free):
        return submitted(engine, seed, temperature, **options)


def is_canonical(engine: RealEngine, seed: int, tokens: list[int]) -> bool:
    """Whether the tokens split the forced text like the tokenizer."""
    follower = engine.vocabulary.follow(constraint(seed))
    for at, token in enumerate(tokens):
        forced = follower.forced()
        if forced and tokens[at : at + len(forced)] != forced[: len(tokens) - at]:
            return False
        assert follower.take(token)
    return True


@dataclass
class Compared:
    """Compares answers with forced tokens to the same ones with every token sampled."""

    n_own_splits: int = 0
    """Answers in which the model splits forced text differently from the tokenizer."""
    n_rounded: int = 0
    """Sampled answers that differ, because rounding depends on the rows of a batch."""
    n_tokens: int = 0
    n_steps: int = 0
    n_steps_drawn: int = 0


def compared(engine: RealEngine, seeds: range, temperature: float) -> Compared:
    found = Compared()
    for seed in seeds:
        at = engine.loop._steps
        forced = submitted(engine, seed, temperature)
        engine.run()
        found.n_steps += engine.loop._steps - at
        at = engine.loop._steps
        plain = drawn(engine, seed, temperature)
        engine.run()
        found.n_steps_drawn += engine.loop._steps - at
        ids, expected = engine.ids(forced), engine.ids(plain)
        found.n_tokens += len(ids)
        assert is_canonical(engine, seed, ids)
        if not is_canonical(engine, seed, expected):
            found.n_own_splits += 1
        elif temperature and ids != expected:
            found.n_rounded += 1
        else:
            assert (ids, engine.text(forced)) == (expected, engine.text(plain)), seed
            assert engine.end(forced).stop_reason == engine.end(plain).stop_reason
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("count", COUNTS)
def test_forced_tokens_do_not_change_the_text(
    engine: RealEngine, temperature: float, count: int
) -> None:
    found = compared(engine, range(count), temperature)
    print(found)
    assert found.n_own_splits <= 0.02 * count
    assert found.n_rounded <= 0.01 * count
    assert found.n_steps < 0.6 * found.n_steps_drawn


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("count", COUNTS)
def test_guesses_under_a_constraint_do_not_change_the_text(
    engine: RealEngine, temperature: float, count: int
) -> None:
    guessing = RealEngine(slots=1, drafter=Lookup())
    speculation, n_rounded, n_before = guess_always(guessing), 0, engine.loop._steps
    for seed in range(count):
        both = [(each, submitted(each, seed, temperature)) for each in (engine, guessing)]
        for each, _ in both:
            each.run()
        [(expected, end), (ids, other_end)] = [(e.ids(id), e.end(id)) for e, id in both]
        n_rounded += ids != expected
        assert ids != expected or end.stop_reason == other_end.stop_reason
    assert n_rounded <= 0.01 * count
    assert guessing.loop._steps < 0.8 * (engine.loop._steps - n_before)
    assert speculation.n_accepted > 10 * count


@pytest.mark.parametrize(("seed", "temperature"), [(0, 0.0), (0, 1.0), (1, 1.0), (2, 1.0)])
def test_another_engine_continues_at_every_token(
    engine: RealEngine, seed: int, temperature: float
) -> None:
    whole = submitted(engine, seed, temperature)
    engine.run()
    ids = engine.ids(whole)
    for at in range(1, len(ids)):
        rest = submitted(engine, seed, temperature, produced=tuple(ids[:at]))
        engine.run()
        assert engine.ids(rest) == ids[at:], at


@pytest.mark.parametrize("unified", [False, True])
def test_concurrent_constrained_streams_have_the_same_text_as_alone(
    engine: RealEngine, unified: bool
) -> None:
    alone = []
    for seed in range(6):
        alone.append(submitted(engine, seed, 0.0))
        engine.run()
    several = RealEngine(slots=3, n_cells=3 * CONTEXT, kv_unified=unified)
    together = [submitted(several, seed, 0.0) for seed in range(6)]
    for _ in range(9):
        several.turn()
    assert several.scheduler.preempt_youngest() is not None
    several.run()
    assert [several.ids(each) for each in together] == [engine.ids(each) for each in alone]


def test_forced_tokens_and_prompts_share_a_batch(engine: RealEngine) -> None:
    """Several streams may get several forced tokens at once, which together with a prompt would
    exceed the rows of a batch."""
    small = RealEngine(slots=3, kv_unified=True, batch=8, prefill_budget=8)
    requests = [submitted(small, 1, 0.0), submitted(small, 2, 0.0)]
    while not all(map(small.text, requests)):
        small.turn()
    requests.append(small.submit("A long prompt. " * 8, max_tokens=4, ignore_eos=True))
    small.run()
    alone = [submitted(engine, seed, 0.0) for seed in (1, 2)]
    engine.run()
    assert [small.text(each) for each in requests[:2]] == [engine.text(each) for each in alone]
    assert len(small.ids(requests[2])) == 4


def test_stops_limits_and_log_probabilities_hold_within_forced_text(engine: RealEngine) -> None:
    whole = submitted(engine, 1, 0.0)
    engine.run()
    text, ids = engine.text(whole), engine.ids(whole)
    assert len(ids) > 2
    for n_most in range(1, len(ids)):
        cut = submitted(engine, 1, 0.0, max_tokens=n_most)
        engine.run()
        end = engine.end(cut)
        assert (engine.ids(cut), end.tokens_out) == (ids[:n_most], n_most)
    stopped = submitted(engine, 1, 0.0, stop=(" choice",))
    engine.run()
    assert engine.text(stopped) == text.partition(" choice")[0]
    for options in ({}, {"post_sampling_probs": True}):
        scored = submitted(engine, 1, 0.0, logprobs=1, **options)
        engine.run()
        events = engine.events[scored]
        found = [p for e in events if hasattr(e, "logprobs") for p in e.logprobs]
        assert [p.token_id for p in found][: len(ids)] == ids == engine.ids(scored)
        assert all(len(p.top) == 1 for p in found)
        if options:
            assert [p.logprob for p in found[1 : len(ids)]] == [0.0] * (len(ids) - 1)
    assert engine.have_finished(whole)
