"""Holes between slots: what a split cache would pay for them, simulated and on llama.cpp."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence as Rows
from itertools import count, pairwise

import pytest

from tests.engine.byte_backend import expected_answer
from tests.engine.real_engine import RealEngine
from tests.engine.test_loop import CONTEXT, Engine
from worker.engine.placement import added_runs, best_moves
from worker.engine.prefix_cache import Slot
from worker.engine.sequence import Sequence
from worker.engine.step import Chunk
from worker.wire.messages import DecodeOutcome, Started

STORY = "Once upon a time, there was a clever fox named "


def slots_used(engine: Engine | RealEngine) -> list[int]:
    return sorted(slot.index for slot in engine.scheduler.slots if slot.owner is not None)


def n_runs(used: list[int]) -> int:
    return bool(used) + sum(b - a > 1 for a, b in pairwise(used))


def slots_of(picture: str, stream: Sequence) -> list[Slot]:
    """`x` is a stream, `.` an idle slot, `k` one that keeps cells."""
    return [
        Slot(i, stream if mark == "x" else None, [1] * 9 if mark == "k" else [])
        for i, mark in enumerate(picture)
    ]


@pytest.mark.parametrize(
    ("picture", "after"),
    [
        ("x.x", ("xx.", ".xx")),
        ("xx..", ("xx..",)),
        ("x..x", ("xx..", "..xx")),
        ("xx.xx...x", ("xxxxx....",)),
        ("xkx.x", (".kxxx",)),
        ("xx.xxx", ("xxxxx.", ".xxxxx")),
        ("xx..xxx", ("..xxxxx", "xxxxx..")),
        ("xxxxx..xxxxx", ("xxxxx..xxxxx",)),
        ("....", ("....",)),
    ],
)
def test_moves_save_most_passes(picture: str, after: tuple[str, ...]) -> None:
    engine = Engine()
    engine.submit(1, b"abc", max_tokens=50)
    engine.turn()
    found = best_moves(slots_of(picture, engine.scheduler.running[0]))
    marks = list(picture)
    for _, source, target in found.moves if found is not None else ():
        marks[source.index], marks[target.index] = ".", "x"
    assert "".join(marks) in after
    assert (found is None) == (picture == after[0])


def test_a_hole_is_worth_most_and_a_far_slot_least() -> None:
    used = {0, 2, 5}
    assert [added_runs(used, i) for i in (1, 3, 4, 6, 7, 8)] == [-1, 0, 0, 0, 1, 1]


def test_arrivals_and_ends_leave_hardly_a_hole_among_64_slots() -> None:
    engine = Engine(n_slots=64, prefill_budget=31, prefill_alone=31)
    fill, counted = engine.backend.fill, list[int]()

    def counting(chunks: Rows[Chunk], draft: Rows[int] = ()) -> None:
        counted.append(n_runs(slots_used(engine)))
        fill(chunks, draft)

    engine.backend.fill = counting  # type: ignore[method-assign]
    engine.loop._clock = count(0.0, 0.001).__next__  # every step takes some time
    dice, request_id = random.Random(5), 0
    texts: dict[int, tuple[bytes, int]] = {}
    for _ in range(600):
        while len(engine.loop._sequences) < 15 and dice.random() < 0.5:
            request_id += 1
            prompt, n_out = dice.randbytes(dice.randint(3, 40)), dice.randint(4, 50)
            texts[request_id] = (prompt, n_out)
            engine.submit(request_id, prompt, max_tokens=n_out)
        engine.turn()
    engine.run()
    for request_id, (prompt, n_out) in texts.items():
        expected = expected_answer(prompt, n_out, CONTEXT)
        assert engine.text(request_id).encode() == expected, "a move loses no cell"
    engine.check_idle()
    assert sum(counted) / len(counted) < 1.5, "it was 4.8 with slots as they come"


class Counted:
    """Counts the nodes of graphs that are computed: llama.cpp asks before each of them."""

    def __init__(self, engine: RealEngine) -> None:
        self.nodes = 0
        flat = engine.context._flat
        self._callback = flat.ggml_abort_callback(self._asked)
        flat.llama_set_abort_callback(engine.context.pointer, self._callback, None)

    def _asked(self, _data: ctypes.c_void_p) -> bool:
        self.nodes += 1
        return False

    def of(self, engine: RealEngine) -> int:
        before = self.nodes
        engine.turn()
        return self.nodes - before


def test_llama_cpp_computes_one_graph_a_step_again_when_streams_have_moved_up() -> None:
    engine = RealEngine(slots=8, prefix_cache=False)
    counted = Counted(engine)
    ids = [engine.submit(STORY + name, max_tokens=60, ignore_eos=True) for name in "ABCDEFGH"]
    for _ in range(6):
        engine.turn()
    assert all(s.n_out > 2 for s in engine.scheduler.running)
    one = counted.of(engine)
    expected = {r: engine.text(r) for r in ids}
    for request_id in ids[1::2]:
        engine.loop.cancel(request_id)
    seconds, engine.scheduler.pace._decode = dict(engine.scheduler.pace._decode), {1: 0.0}
    apart = counted.of(engine)
    assert apart == pytest.approx(4 * one, rel=0.2), "four runs are four passes"
    engine.scheduler.pace._decode = seconds
    engine.scheduler._is_placed = False
    for _ in range(3):
        engine.turn()
    assert n_runs(slots_used(engine)) == 1
    assert counted.of(engine) == pytest.approx(one, rel=0.2)
    engine.run()
    for request_id, name in list(zip(ids, "ABCDEFGH", strict=True))[::2]:
        assert engine.text(request_id).startswith(expected[request_id])
        alone = engine.generate(STORY + name, max_tokens=60, ignore_eos=True)
        assert engine.text(request_id) == alone
    engine.close()


@pytest.mark.parametrize("seed", range(4))
def test_conversations_keep_their_cells_while_there_is_a_slot_for_each(seed: int) -> None:
    """Eight conversations in eight slots, four turns at a time. To compute one again costs as much
    as a hundred passes over all weights, as one of a thousand tokens does on a CPU."""
    engine = Engine(n_slots=8, batch=96, prefill_budget=64, prefill_alone=96)
    decode = engine.backend.decode

    def taking_time() -> DecodeOutcome:
        n_prompt = sum(c.n_tokens for c in engine.backend._chunks if c.n_tokens > 1)
        engine.now += 0.016 * n_runs(slots_used(engine)) + 0.03 * n_prompt
        return decode()

    engine.backend.decode = taking_time  # type: ignore[method-assign]
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
                (first,) = [e for e in engine.events[number] if isinstance(e, Started)]
                n_lost += turn > 0 and first.cached_tokens < known[index] - 1
                conversations[index] += engine.text(number).encode()
    assert n_lost == 0
