"""What the scheduler computes separately: parts of media, and sequences on trial after NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from tests.unit.engine.test_cache import some
from tests.unit.engine.test_scheduler import added, run_steps, scheduler_of
from worker.engine.cache.moves import Divide, Save
from worker.engine.media.span import Span
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.step import Chunk, Step


@dataclass
class Part:
    """A part of a medium, with what a plan needs."""

    n_tokens: int
    at_once: bool = False

    @property
    def n_positions(self) -> int:
        return self.n_tokens


def with_medium(
    scheduler: Scheduler, before: int, n_medium: int, after: int, first: int = 5000
) -> Sequence:
    (sequence,) = added(scheduler, some(before + n_medium + after, first))
    sequence.spans = (Span(before, cast(Any, Part(n_medium)), b"medium"),)
    return sequence


def chunks_of(step: Step) -> dict[Sequence, int]:
    return {chunk.sequence: chunk.n_tokens for chunk in step.chunks}


# --- parts of media --------------------------------------------------------------------------


def test_a_part_of_a_medium_is_a_separate_step() -> None:
    scheduler = scheduler_of()
    (stream,) = added(scheduler, some(5))
    run_steps(scheduler, 2)
    shown = with_medium(scheduler, 10, 20, 7)
    (prompt,) = added(scheduler, some(40, 900))
    step = run_steps(scheduler)
    assert chunks_of(step) == {stream: 1, shown: 10, prompt: 40} and step.span is None
    step = run_steps(scheduler)
    assert step.chunks == [Chunk(shown, 10, 20)] and step.span is shown.spans[0]
    assert step.has_prompts
    step = run_steps(scheduler)
    assert chunks_of(step) == {stream: 1, shown: 7, prompt: 1} and step.span is None


def test_a_medium_is_computed_in_batches() -> None:
    scheduler = scheduler_of(batch=16)
    shown = with_medium(scheduler, 0, 40, 3)
    steps = [run_steps(scheduler) for _ in range(4)]
    assert [step.chunks for step in steps] == [
        [Chunk(shown, start, n)] for start, n in ((0, 16), (16, 16), (32, 8), (40, 3))
    ]
    assert [step.span for step in steps] == [*shown.spans * 3, None]


def test_others_continue_while_the_projector_owes_them_time() -> None:
    scheduler = scheduler_of()
    (stream,) = added(scheduler, some(5))
    run_steps(scheduler, 2)
    shown = with_medium(scheduler, 0, 20, 7)
    (prompt,) = added(scheduler, some(40, 900))
    scheduler.pace.encoded(1.0)
    step = run_steps(scheduler)
    assert chunks_of(step) == {stream: 1, prompt: 40} and step.span is None
    assert chunks_of(run_steps(scheduler)) == {stream: 1, prompt: 1}
    scheduler.pace.measured(2, 0, 1.0)
    assert chunks_of(run_steps(scheduler)) == {shown: 20}


def test_media_do_not_wait_if_nothing_runs_beside_them() -> None:
    scheduler = scheduler_of()
    first, second = (with_medium(scheduler, 0, 20, 7, 1000 * n) for n in (1, 2))
    scheduler.pace.encoded(1.0)
    assert chunks_of(run_steps(scheduler)) == {first: 20}
    assert chunks_of(run_steps(scheduler)) == {first: 7}, "there is somebody beside the second now"
    scheduler.pace.measured(1, 0, 1.0)
    assert chunks_of(run_steps(scheduler)) == {second: 20}


# --- on trial --------------------------------------------------------------------------------


def three_streams(**more: Any) -> tuple[Scheduler, list[Sequence]]:
    scheduler = scheduler_of(**more)
    common = some(60)
    streams = added(scheduler, [*common, 900], [*common, 901], [*common, 902])
    while len(scheduler.running) < 3 or not all(each.n_out for each in streams):
        run_steps(scheduler)
    return scheduler, streams


def test_after_nan_each_computes_a_token_alone_and_from_its_first_token_on() -> None:
    scheduler, (first, second, third) = three_streams()
    (late,) = added(scheduler, some(30, 5000))
    scheduler.put_on_trial(second)
    assert not scheduler.nan_is_its_own(second), "others were beside it"
    for sequence, n_waiting in ((second, 3), (first, 2), (third, 1)):
        n_tokens = len(sequence.tokens)
        step = scheduler.plan()
        assert step.started == [sequence] and step.chunks == [Chunk(sequence, 0, n_tokens)]
        assert not any(isinstance(move, Save) for move in step.moves)
        assert len(scheduler.waiting) == n_waiting
        assert scheduler.nan_is_its_own(sequence) == (sequence is second)
        assert any(isinstance(move, Divide) for move in step.moves) == (sequence is second)
        scheduler.cache.settled()
        scheduler.advance(step)
        sequence.tokens.append(7)
        assert not scheduler.nan_is_its_own(sequence), "its token is drawn"
    step = run_steps(scheduler)
    assert step.started == [late] and chunks_of(step) == {second: 1, first: 1, third: 1, late: 30}


def test_a_long_prompt_is_tried_alone_to_its_end() -> None:
    scheduler = scheduler_of(prefill_budget=64)
    first, second = added(scheduler, some(150), some(150, 1000))
    run_steps(scheduler)
    scheduler.put_on_trial(first)
    for sequence in (first, second):
        steps = [chunks_of(run_steps(scheduler)) for _ in range(3)]
        assert steps == [{sequence: 64}, {sequence: 64}, {sequence: 22}]
    assert chunks_of(run_steps(scheduler)) == {first: 1, second: 1}


def test_a_sequence_that_leaves_on_trial_blocks_nobody() -> None:
    scheduler, (first, second, third) = three_streams()
    (late,) = added(scheduler, some(30, 5000))
    scheduler.put_on_trial(first)
    run_steps(scheduler)
    assert scheduler.preempt_youngest() is None
    scheduler.remove(second, keep_cells=False)
    assert scheduler.plan().started == [third]
    assert scheduler.preempt_youngest() is third and third.saved is None, "it may hold NaN"
    scheduler.remove(third, keep_cells=False)
    step = run_steps(scheduler)
    assert step.started == [late] and chunks_of(step) == {first: 1, late: 30}


def test_a_medium_of_a_sequence_on_trial_does_not_wait() -> None:
    scheduler = scheduler_of()
    (stream,) = added(scheduler, some(5))
    shown = with_medium(scheduler, 0, 20, 7)
    run_steps(scheduler, 2)
    scheduler.put_on_trial(stream)
    run_steps(scheduler)
    scheduler.pace.encoded(1.0)
    assert chunks_of(run_steps(scheduler)) == {shown: 20}
    assert list(chunks_of(run_steps(scheduler))) == [shown]


def test_a_lone_sequence_is_not_on_trial() -> None:
    scheduler = scheduler_of()
    (stream,) = added(scheduler, some(5))
    run_steps(scheduler, 2)
    assert not scheduler.nan_is_its_own(stream)
    scheduler.put_on_trial(stream)
    scheduler.plan()
    assert scheduler.nan_is_its_own(stream)


# --- how many rows each has --------------------------------------------------------------------


@pytest.mark.parametrize("unified", [False, True])
def test_forced_tokens_are_rows_of_one_step_if_that_is_one_pass(unified: bool) -> None:
    scheduler = scheduler_of(2, unified=unified)
    first, second = added(scheduler, some(20), some(20, 1000))
    run_steps(scheduler, 2)
    first.tokens += [8, 9, 10]
    assert chunks_of(scheduler.plan()) == {first: 4 if unified else 1, second: 1}
    scheduler.remove(second, keep_cells=False)
    assert chunks_of(scheduler.plan()) == {first: 4}


def test_a_step_has_no_more_rows_than_a_batch_and_each_has_one() -> None:
    scheduler = scheduler_of(3, unified=True, batch=7)
    first, second = added(scheduler, some(3), some(3, 1000))
    while not (first.n_out and second.n_out):
        run_steps(scheduler)
    for sequence in (first, second):
        sequence.tokens += [8] * 9
    (prompt,) = added(scheduler, some(30, 2000))
    assert chunks_of(scheduler.plan()) == {first: 5, second: 1, prompt: 1}
    del first.tokens[-9:], second.tokens[-9:]
    assert chunks_of(scheduler.plan()) == {first: 1, second: 1, prompt: 5}


def test_a_single_tile_goes_to_the_oldest_prompt_every_other_step() -> None:
    scheduler = scheduler_of(prefill_budget=64)
    long, short = added(scheduler, some(600), some(300, 1000))
    steps = [chunks_of(run_steps(scheduler)) for _ in range(4)]
    assert steps in ([{long: 64}, {short: 64}] * 2, [{short: 64}, {long: 64}] * 2)
