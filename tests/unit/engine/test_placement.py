"""Gaps between slots, and their cost in a split cache, simulated and on llama.cpp."""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows
from itertools import count

import pytest

from tests.unit.engine.test_cache import n_runs
from tests.unit.engine.test_loop import Engine
from worker.engine.model_runner import NO_DRAFTS, Drafts
from worker.engine.step import Chunk
from worker.wire.messages import DecodeOutcome


def slots_used(engine: Engine) -> set[int]:
    return {slot.index for slot in engine.cache.slots if slot.owner is not None}


def test_arrivals_and_ends_leave_hardly_a_hole_among_64_slots() -> None:
    engine = Engine(n_slots=64, prefill_budget=31)
    fill, counted = engine.runner.fill, list[int]()

    def counting(chunks: Rows[Chunk], drafts: Drafts = NO_DRAFTS) -> None:
        counted.append(n_runs(slots_used(engine)))
        fill(chunks, drafts)

    engine.runner.fill = counting  # type: ignore[method-assign]
    engine.loop._clock = count(0.0, 0.001).__next__  # every step takes some time
    dice, request_id = random.Random(5), 0
    for _ in range(600):
        while len(engine.loop._sequences) < 15 and dice.random() < 0.5:
            request_id += 1
            prompt = dice.randbytes(dice.randint(3, 40))
            engine.submit(request_id, prompt, max_tokens=dice.randint(4, 50))
        engine.turn()
    engine.run()  # a move loses no cell
    assert engine.have_finished(*range(1, request_id + 1))
    engine.check_idle()
    assert sum(counted) / len(counted) < 1.7, (
        "it was 3.2 without moves, 4.8 with slots as they come"
    )


@pytest.mark.parametrize("seed", range(4))
def test_conversations_keep_their_cells_while_there_is_a_slot_for_each(seed: int) -> None:
    """Eight conversations in eight slots, four turns at a time. Computing one again costs as much
    as a hundred passes over all weights, like one of a thousand tokens on a CPU."""
    engine = Engine(n_slots=8, batch=96, prefill_budget=64)
    decode = engine.runner.decode

    def taking_time() -> DecodeOutcome:
        n_prompt = sum(c.n_tokens for c in engine.runner._chunks if c.n_tokens > 1)
        engine.now += 0.016 * n_runs(slots_used(engine)) + 0.03 * n_prompt
        return decode()

    engine.runner.decode = taking_time  # type: ignore[method-assign]
    engine.submit(0, b"a pass is measured when it is alone", max_tokens=4)
    engine.run()
    dice, request_id, n_lost = random.Random(seed), 0, 0
    conversations = [dice.randbytes(60) for _ in range(8)]
    for turn in range(5):
        order = dice.sample(range(8), 8)
        for some in (order[:4], order[4:]):
            known = {index: len(conversations[index]) for index in some}
            started = {}
            for index in some:
                request_id += 1
                started[index] = request_id
                conversations[index] += b"?"
                engine.submit(request_id, conversations[index], max_tokens=dice.randint(1, 6))
            engine.run()
            for index, number in started.items():
                n_lost += turn > 0 and engine.cached_tokens(number) < known[index] - 1
                conversations[index] += engine.text(number).encode()
    assert n_lost == 0
