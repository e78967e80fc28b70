"""A pool that is divided into parts while these are long enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.test_cache import asking, limits_of
from tests.unit.engine.test_loop import Engine
from tests.unit.engine.test_scheduler import run_steps
from worker.engine.cache.moves import Divide
from worker.engine.scheduler import Scheduler

SHORT, LONG = b"a short prompt of thirty letters", bytes(range(97, 123)) * 3


def divided_engine(*, has_still_tokens: bool = False) -> Engine:
    """An engine with four parts of 50 cells, two of 100, or 200 cells in one pool."""
    return Engine(
        4,
        200,
        unified=True,
        divisions=(4, 2),
        has_still_tokens=has_still_tokens,
        prefill_budget=24,
    )


def n_slots(engine: Engine) -> list[int]:
    """Return the numbers of slots of the engine's layouts, in order; 0 is one pool."""
    return [0 if each.unified else each.n_slots for each in engine.runner.layouts]


LAYOUTS = [limits_of(n, n_cells=200, unified=n == 3, memory_bytes=9000) for n in (4, 2, 3)]
"""Parts of 50 and of 100 cells, and one pool for three sequences."""


@given(
    st.lists(
        st.tuples(st.just("arrives"), st.sampled_from([1, 49, 50, 51, 99, 100, 101, 200]))
        | st.tuples(st.sampled_from(["ends", "goes on"]), st.integers(0, 3)),
        min_size=20,
        max_size=60,
    )
)
def test_the_cells_are_laid_out_for_the_present_requests(events: list[tuple[str, int]]) -> None:
    """In longer parts if a sequence needs them, in shorter ones if more can then run at once:
    always the best parts that fit all running and starting ones. A change loses no request, and the
    oldest continues first."""
    scheduler = Scheduler(*LAYOUTS)
    for event, n in events:
        running, before = list(scheduler.running), scheduler.limits
        if event == "arrives":
            sequence = asking([len(scheduler.waiting)] * n)
            sequence.n_most = n + 1  # its only token is not computed
            scheduler.add(sequence)
            continue
        if event == "ends" and n < len(running):
            scheduler.remove(running.pop(n), keep_cells=n % 2 == 0)
        everybody = [*running, *scheduler.waiting]
        alive = everybody[:4] if len(running) < 4 else running
        longest = max((len(each.tokens) for each in alive), default=0)
        n_without_loss = 1 if before.unified else before.n_slots
        expected = before
        if longest > before.longest or len(alive) > n_without_loss:
            expected = next(each for each in LAYOUTS if longest <= each.longest)
        if not scheduler.cache.is_settled:
            expected = before
        divided = [each for each in run_steps(scheduler).moves if isinstance(each, Divide)]
        assert scheduler.limits is expected
        layout = Divide(expected.n_cells, expected.n_slots, expected.unified)
        assert divided == ([layout] if expected is not before else [])
        assert {*scheduler.running, *scheduler.waiting} == {*everybody}
        going_on = [each for each in scheduler.running if each in running]
        assert going_on == running[: len(going_on)]
        for each in scheduler.running:
            del each.tokens[each.n_prompt :]


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "layouts"),
    [
        ([SHORT[: 10 + n] for n in range(6)], 16, [4]),
        ([SHORT[:20], bytes(97 + n % 7 for n in range(150))], 16, [4, 0]),
        ([bytes([98 + n]) * 12 for n in range(3)], 70, [4, 2]),
    ],
    ids=["as long as all fit", "for what fits in no part", "for answers that outgrow theirs"],
)
def test_the_layout_changes(prompts: list[bytes], max_tokens: int, layouts: list[int]) -> None:
    engine = divided_engine()
    for request_id, prompt in enumerate(prompts):
        engine.submit(request_id, prompt, max_tokens=max_tokens)
    engine.run()
    assert engine.have_finished(*range(len(prompts)))
    assert n_slots(engine) == layouts


@pytest.mark.parametrize("has_still_tokens", [False, True])
@pytest.mark.parametrize(("n_streams", "n_turns"), [(2, 6), (4, 12)])
def test_a_long_prompt_gets_a_longer_part_and_streams_keep_their_cells(
    n_streams: int, n_turns: int, has_still_tokens: bool
) -> None:
    """Including streams that lose their slot in the longer parts."""
    engine = divided_engine(has_still_tokens=has_still_tokens)
    for request_id in range(n_streams):
        engine.submit(request_id, SHORT[request_id : 20 + request_id])
    for _ in range(n_turns):
        engine.turn()
    engine.submit(n_streams, LONG)
    engine.run()
    assert engine.have_finished(*range(n_streams + 1))
    assert n_slots(engine)[:2] == [4, 2]
    assert engine.computes_nothing_twice()


def test_idle_conversations_outlive_a_change_in_memory() -> None:
    engine = divided_engine()
    first = bytes(97 + n % 11 for n in range(40))
    engine.submit(0, first, max_tokens=1)
    engine.run()
    engine.submit(1, LONG)
    engine.run()
    engine.runner.batches.clear()
    engine.submit(2, first + b"and on", max_tokens=1)
    engine.run()
    n_computed = sum(n for batch in engine.runner.batches for _, _, n in batch)
    assert n_computed < len(first), "its beginning came back from memory"
