"""The scheduler alone: plans without a runner."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.test_cache import asking, limits_of, n_runs, put, some
from worker.engine.cache.moves import Copy, Save
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Awaited, Sequence
from worker.engine.step import Chunk, Step
from worker.engine.turns import MOST_STEPS


def scheduler_of(n_slots: int = 4, **more: Any) -> Scheduler:
    return Scheduler(limits_of(n_slots, **more))


def run_steps(scheduler: Scheduler, n_steps: int = 1) -> Step:
    """Plan steps and mark each as computed: a token is drawn where a prompt has ended."""
    for _ in range(n_steps):
        step = scheduler.plan()
        if step.chunks:
            scheduler.cache.settled()
        scheduler.advance(step)
        for chunk in step.chunks:
            if chunk.sequence.n_computed == len(chunk.sequence.tokens):
                chunk.sequence.tokens.append(7)
    return step


def start_of(step: Step, sequence: Sequence) -> int:
    """Return the number of a sequence's tokens before a step computes more."""
    return next(chunk.start for chunk in step.chunks if chunk.sequence is sequence)


def works(scheduler: Scheduler) -> bool:
    return scheduler.has_work


def added(scheduler: Scheduler, *prompts: list[int], **request: Any) -> list[Sequence]:
    sequences = [asking(prompt, **request) for prompt in prompts]
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


def test_a_step_has_a_row_of_each_stream_and_the_prompts() -> None:
    scheduler = scheduler_of()
    (stream,) = added(scheduler, some(5))
    first = scheduler.plan()
    assert first.chunks == [Chunk(stream, 0, 5)] and first.started == [stream]
    assert stream.n_computed == 0, "it was not computed yet"
    scheduler.advance(first)
    assert stream.n_computed == 5
    stream.tokens.append(1)
    (prompt,) = added(scheduler, some(40, 100))
    (silent,) = added(scheduler, some(40, 200))
    step = scheduler.plan()
    assert step.chunks == [Chunk(stream, 5, 1), Chunk(prompt, 0, 40), Chunk(silent, 0, 40)]
    assert step.started == [prompt, silent] and first.has_prompts and step.has_prompts


def test_a_prompt_of_one_token_is_a_prompt() -> None:
    scheduler = scheduler_of()
    (sequence,) = added(scheduler, [1])
    step = scheduler.plan()
    assert step.chunks == [Chunk(sequence, 0, 1)] and step.has_prompts
    scheduler.advance(step)
    sequence.tokens.append(2)
    assert not scheduler.plan().has_prompts


KINDS: list[dict[str, Any]] = [
    {},
    {"adapters": ((0, 1.0),)},
    {"adapters": ((0, 0.5),)},
    {"adapters": ((0, 1.0), (1, 1.0))},
    {"deterministic": True},
    {"deterministic": True, "adapters": ((0, 1.0),)},
]


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6), st.sampled_from([0.001, 0.5]))
def test_groups_of_equal_adapters_take_turns_of_a_few_steps(
    kinds: list[dict[str, Any]], seconds: float
) -> None:
    """A batch has one set of adapters and all of its group; no group waits for more than one turn
    of each other group. If steps take long, a turn is one step."""
    scheduler = scheduler_of(6, inter_token_seconds=0.2)
    for n_rows in range(1, 7):
        scheduler.pace.measured(n_rows, 0, seconds)
    sequences = [
        added(scheduler, some(5, 100 * number), **kind)[0] for number, kind in enumerate(kinds)
    ]
    groups: dict[object, list[Sequence]] = {}
    for sequence, kind in zip(sequences, kinds, strict=True):
        alone = id(sequence) if kind.get("deterministic") else None
        groups.setdefault((kind.get("adapters"), alone), []).append(sequence)
    run_steps(scheduler, 2 * len(groups))
    steps = [[c.sequence for c in run_steps(scheduler).chunks] for _ in range(12 * len(groups))]
    assert all(step in groups.values() for step in steps)
    n_steps = MOST_STEPS if seconds == 0.001 else 1
    for group in groups.values() if len(groups) > 1 else ():
        runs = [(mine, len(list(run))) for mine, run in groupby(steps, group.__eq__)]
        turns = [n for mine, n in runs[1:-1] if mine]
        waits = [n for mine, n in runs if not mine]
        assert set(turns) == {n_steps} and max(waits) == (len(groups) - 1) * n_steps
    for sequence in sequences:
        assert sequence.slot is not None
        slot = scheduler.cache.slots[sequence.slot]
        scheduler.remove(sequence, keep_cells=True)
        assert bool(slot.kept) == (not sequence.request.deterministic)
    (last,) = added(scheduler, some(5, 900))
    assert [chunk.sequence for chunk in run_steps(scheduler).chunks] == [last]


def test_a_prompt_keeps_the_pace_of_streams_with_other_adapters() -> None:
    """Its step has no rows of these streams, but they wait for it all the same."""
    scheduler = scheduler_of(2, prefill_budget=256, inter_token_seconds=0.1)
    (stream,) = added(scheduler, some(5))
    run_steps(scheduler, 3)
    scheduler.pace.measured(1, 0, 0.05)
    scheduler.pace.measured(0, 512, 0.512)
    added(scheduler, some(700, 1000), adapters=((0, 1.0),))
    prompt_steps = []
    for _ in range(12):
        step = run_steps(scheduler)
        if step.has_prompts:
            prompt_steps.append([chunk.n_tokens for chunk in step.chunks])
        else:
            assert [chunk.sequence for chunk in step.chunks] == [stream]
    assert prompt_steps[:3] == [[64]] * 3


def test_cells_are_kept_only_if_that_was_asked_for() -> None:
    for prefix_cache, keep_cells in ((True, True), (True, False), (False, True)):
        scheduler = scheduler_of(prefix_cache=prefix_cache)
        (sequence,) = added(scheduler, some(50))
        run_steps(scheduler)
        scheduler.remove(sequence, keep_cells=keep_cells)
        assert (scheduler.cache.cells_cached > 0) == (prefix_cache and keep_cells)
        assert not scheduler.running and not scheduler.has_work


def test_there_is_work_only_if_it_can_be_done_now() -> None:
    scheduler = scheduler_of(2)
    assert not works(scheduler)
    reading = added(scheduler, some(40), some(40, 100))
    for sequence in reading:
        sequence.awaits_disk = True
    assert not works(scheduler)
    (behind,) = added(scheduler, some(40, 200))
    assert not works(scheduler), "all slots are kept for those before it"
    assert scheduler.plan().chunks == []
    reading[1].awaits_disk = False
    assert works(scheduler)
    assert run_steps(scheduler).started == [reading[1]]
    assert not run_steps(scheduler).started, "a slot stays reserved"
    reading[0].awaits_disk = False
    assert run_steps(scheduler).started == [reading[0]]
    assert works(scheduler) and list(scheduler.waiting) == [behind]


def test_a_sequence_that_ends_while_it_waits_keeps_nothing() -> None:
    scheduler = scheduler_of(1)
    first, waiting = added(scheduler, some(40), some(40, 100))
    run_steps(scheduler)
    state = scheduler.cache.save(put(scheduler.cache, 0, some(40)), is_awaited=True)
    assert state is not None
    waiting.saved, waiting.awaits_disk = state, True
    scheduler.remove(waiting, keep_cells=True)
    assert [state.n_locks, waiting.saved, waiting.awaits_disk] == [0, None, False]
    assert not scheduler.waiting and scheduler.running == [first]


def test_sequences_start_in_order_when_they_fit() -> None:
    scheduler = scheduler_of(4, unified=True, n_cells=100)
    sequences = added(scheduler, some(60), some(60, 100), some(5, 200))
    assert run_steps(scheduler).started == sequences[:1]
    assert not run_steps(scheduler).started, "the third does not overtake the second"
    scheduler.remove(sequences[0], keep_cells=True)
    assert run_steps(scheduler).started == sequences[1:]
    assert scheduler.running == sequences[1:]


def test_when_the_first_waiting_sequence_leaves_the_next_is_checked() -> None:
    scheduler = scheduler_of(4, unified=True, n_cells=100)
    first, large, small = added(scheduler, some(60), some(60, 100), some(5, 200))
    run_steps(scheduler, 2)
    scheduler.remove(large, keep_cells=False)
    assert run_steps(scheduler).started == [small] and scheduler.running == [first, small]


def test_a_full_pool_is_not_checked_again_before_a_sequence_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for n_slots, more in ((1, {}), (4, {"unified": True, "n_cells": 100})):
        scheduler = scheduler_of(n_slots, **more)
        sequences = added(scheduler, some(60), some(60, 100))
        run_steps(scheduler, 2)
        looked: list[Step] = []
        start_waiting = Scheduler._start_waiting

        def looks(
            self: Scheduler, step: Step, looked: Any = looked, look: Any = start_waiting
        ) -> None:
            looked.append(step)
            look(self, step)

        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "_start_waiting", looks)
            run_steps(scheduler, 3)
            assert not looked
            scheduler.remove(sequences[0], keep_cells=True)
            assert run_steps(scheduler).started == sequences[1:] and looked


def test_a_common_prefix_is_computed_by_the_first_alone() -> None:
    scheduler = scheduler_of(4, prefill_budget=64)
    common = some(100)
    first, second, third, other, late = added(
        scheduler,
        common + [900],
        common + [901],
        common + [902],
        some(10, 500),
        some(10, 600),
    )
    step = run_steps(scheduler)
    assert step.started == [first, other], "two slots are reserved, and one is for whoever comes"
    assert second.awaited == Awaited(first, 100)
    while first.n_computed < 100:
        assert not run_steps(scheduler).started, "nobody overtakes those who wait"
    step = run_steps(scheduler)
    assert step.started == [second, third], "the beginning is there"
    assert start_of(step, second) == start_of(step, third) == 100
    assert list(scheduler.waiting) == [late]


def test_memory_that_cannot_be_cut_gets_a_snapshot_for_a_waiting_prompt() -> None:
    scheduler = scheduler_of(3, recurrent=True, prefill_budget=64)
    first, second = added(scheduler, some(150), some(100) + [900] * 30)
    scheduler.plan()
    assert first.snapshot_at[100] is True and second.awaited == Awaited(first, 100)


def test_the_youngest_goes_back_to_the_head_of_the_queue() -> None:
    scheduler = scheduler_of(3)
    first, second, third = added(scheduler, some(40), some(40, 100), some(40, 200))
    run_steps(scheduler)
    (waiting,) = added(scheduler, some(40, 300))
    assert scheduler.preempt_youngest() is third
    assert list(scheduler.waiting) == [third, waiting] and scheduler.running == [first, second]
    assert third.saved is not None and third.slot is None
    step = run_steps(scheduler)
    assert step.started == [third] and start_of(step, third) == 40
    assert any(isinstance(move, Save) for move in step.moves)
    assert scheduler.preempt_youngest() is third and scheduler.preempt_youngest() is second
    assert scheduler.preempt_youngest() is None, "it would need the same room again"
    assert scheduler.running == [first]


@given(st.sets(st.integers(0, 7), min_size=1, max_size=6))
def test_holes_are_closed_one_stream_a_step_until_no_move_helps(gone: set[int]) -> None:
    for unified in (False, True):
        scheduler = scheduler_of(8, unified=unified)
        sequences = added(scheduler, *(some(10, 100 * number) for number in range(8)))
        for sequence in sequences:
            sequence.n_most = 10_000
        run_steps(scheduler, 3)
        scheduler.pace.measured(8, 0, 1.0)
        assert not run_steps(scheduler).moves
        for number in gone:
            scheduler.remove(sequences[number], keep_cells=False)
        n_copies = []
        for _ in range(8):
            moves = run_steps(scheduler).moves
            n_copies.append(sum(isinstance(move, Copy) for move in moves))
        assert n_copies == sorted(n_copies, reverse=True) and max(n_copies) <= 1
        used = {s.slot for s in scheduler.running if s.slot is not None}
        others = [(used - {a}) | {b} for a in used for b in set(range(8)) - used]
        if unified:
            assert sum(n_copies) == 0, "all are one pass"
        else:
            assert n_runs(used) <= min(map(n_runs, others))


def test_a_stream_moves_next_to_one_that_continues_in_its_own_cells() -> None:
    scheduler = scheduler_of(6)
    (stream,) = added(scheduler, some(10))
    stream.n_most = 10_000
    run_steps(scheduler, 3)
    scheduler.pace.measured(1, 0, 1.0)
    assert not run_steps(scheduler).moves and stream.slot == 0
    scheduler.cache.slots[3].kept = some(50, 500)
    (returns,) = added(scheduler, some(60, 500))
    run_steps(scheduler, 2)
    assert returns.slot == 3 and stream.slot in (2, 4)


@pytest.mark.parametrize("n_groups", [1, 2, 3])
@pytest.mark.parametrize("n_before", [0, 1])
def test_the_oldest_prompt_of_each_group_advances_beside_ever_new_ones(
    n_groups: int, n_before: int
) -> None:
    scheduler = scheduler_of(12, prefill_budget=64, n_cells=12_000)
    groups: list[Any] = [((number, 1.0),) if number else () for number in range(n_groups)]
    added(scheduler, *[some(64, 9000)] * n_before)
    oldest = [added(scheduler, some(400, 1000 * n), adapters=a)[0] for n, a in enumerate(groups)]
    for turn in range(60 * n_groups):
        alive = [*scheduler.running, *scheduler.waiting]
        for adapters in groups:
            n_short = sum(each.request.adapters == adapters for each in alive)
            added(scheduler, *[some(64, 100 * turn)] * (3 - n_short), adapters=adapters)
        for chunk in run_steps(scheduler).chunks:
            if chunk.sequence.n_out and chunk.sequence not in oldest:
                scheduler.remove(chunk.sequence, keep_cells=False)
    assert all(each.n_out for each in oldest)


def test_a_lone_prompt_waits_for_no_batch_to_settle_a_copy() -> None:
    """A step may lose all its chunks if their moves or a picture fail, and may be the last one."""
    scheduler = scheduler_of(2)
    (first,) = added(scheduler, some(64))
    run_steps(scheduler)
    added(scheduler, [*first.tokens[:48], 1, 2])
    step = scheduler.plan()
    assert [type(move) for move in step.moves] == [Copy]
    for sequence in list(scheduler.running):
        scheduler.remove(sequence, keep_cells=True)
    assert not scheduler.cache.is_settled
    (alone,) = added(scheduler, [*first.tokens[:48], 3, 4])
    step = run_steps(scheduler)
    assert step.started == [alone] and start_of(step, alone) == 0
    assert scheduler.cache.is_settled
