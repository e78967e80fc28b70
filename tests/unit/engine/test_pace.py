"""The prompt budget of a step on a simulated machine with known costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.byte_runner import make_sequence
from tests.unit.engine.test_loop import Engine
from worker.engine.pace import TILE_TOKENS, Pace
from worker.engine.step import split_budget

Machine = Callable[[int, int], float]


def linear(n_decoding: int, n_prompt: int) -> float:
    """10 ms per step plus 2 ms per row and 0.1 ms per prompt token."""
    return (0.010 + 0.002 * n_decoding if n_decoding else 0.0) + 0.0001 * n_prompt


def bent(n_decoding: int, n_prompt: int) -> float:
    """Like memory-bound devices: the first 64 rows cost the same as one."""
    return 0.020 + 0.0001 * max(n_decoding + n_prompt - 64, 0)


def steps(pace: Pace, machine: Machine, n_decoding: int, count: int = 30) -> list[float]:
    """Return the times of steps while a prompt joins, after steps without one."""
    pace.measured(0, 512, machine(0, 512))
    pace.measured(n_decoding, 0, machine(n_decoding, 0))
    seconds = []
    for _ in range(count):
        n_prompt = pace.budget(n_decoding)
        seconds.append(machine(n_decoding, n_prompt))
        pace.measured(n_decoding, n_prompt, seconds[-1])
    return seconds


@pytest.mark.parametrize("machine", [linear, bent])
@pytest.mark.parametrize("n_decoding", [1, 4, 16])
def test_steps_come_near_the_target_and_stay_below(machine: Machine, n_decoding: int) -> None:
    settled = steps(Pace(0.1, 4096), machine, n_decoding)[15:]
    assert max(settled) <= 0.105
    assert min(settled) >= 0.08, "prompts get what the streams leave"


def test_prompts_fill_whole_tiles() -> None:
    """Rows of a partial tile take a multiple of the time, where a fewer-is-cheaper rule would get
    stuck."""

    def tiled(n_decoding: int, n_prompt: int) -> float:
        tiles, rest = divmod(n_prompt, TILE_TOKENS)
        return 0.015 * bool(n_decoding) + 0.003 * TILE_TOKENS * tiles + 0.007 * rest

    settled = steps(Pace(0.15, 256), tiled, 1)
    assert set(settled[1:]) == {tiled(1, TILE_TOKENS)}


def test_the_first_step_of_all_is_as_large_as_it_may_be() -> None:
    assert Pace(0.1, 256).budget(4) == 256
    assert Pace(0.1, 256).budget(0) == 256


def test_prompts_move_on_where_the_target_cannot_be_reached() -> None:
    pace = Pace(0.001, 4096)
    settled = steps(pace, linear, 16)[15:]
    alone = linear(16, 0)
    assert settled[-1] == pytest.approx(2 * alone, rel=0.1)
    expensive = Pace(0.001, 256)
    steps(expensive, lambda n, p: 0.01 + 0.5 * p, 1)
    assert expensive.budget(1) == TILE_TOKENS


def test_a_machine_that_becomes_slower_is_noticed_within_some_steps() -> None:
    pace = Pace(0.1, 4096)
    steps(pace, linear, 4)
    slow = steps(pace, lambda n, p: 3 * linear(n, p), 4)
    assert max(slow[8:]) <= 0.125


def test_steps_grow_where_requests_queue_up() -> None:
    pace = Pace(0.1, 4096)
    steps(pace, linear, 8)
    plain = linear(8, 0)
    assert linear(8, pace.budget(8, 8)) == pytest.approx(0.2, rel=0.15)
    assert pace.budget(8, 0) < pace.budget(8, 1) < pace.budget(8, 8)
    assert plain < linear(8, pace.budget(8, 0)) <= 0.105


def test_the_cost_of_rows_is_also_learned_beside_prompts() -> None:
    pace = Pace(0.1, 4096)
    pace.measured(0, 512, linear(0, 512))
    pace.measured(1, 0, linear(1, 0))
    for _ in range(20):  # sixteen streams, and no step without a prompt
        n_prompt = pace.budget(16)
        pace.measured(16, n_prompt, linear(16, n_prompt))
    assert pace.decode_seconds(16) == pytest.approx(linear(16, 0), rel=0.2)


@pytest.mark.parametrize(("n_prompts", "n_tokens"), [(1, 64), (2, 128), (3, 192)])
def test_prompts_that_wait_for_each_other_make_a_step_longer(n_prompts: int, n_tokens: int) -> None:
    engine = Engine(n_slots=4, batch=512, prefill_budget=256, inter_token_seconds=0.1)
    engine.submit(9, b"runs", max_tokens=60)
    engine.turn()
    pace = engine.scheduler.pace
    pace.measured(1, 0, 0.03)
    pace.measured(1, 64, 0.1)
    for request_id in range(n_prompts):
        engine.submit(request_id, bytes([request_id + 1]) * 90, max_tokens=1)
    engine.turn()
    assert sum(n for r, _, n in engine.runner.batches[-1] if r != 9) == n_tokens


def test_a_tile_belongs_to_one_prompt() -> None:
    """Each prompt in a step is a separate pass, so two cannot share a tile."""
    first, second = (make_sequence(i, bytes(n)) for i, n in ((1, 300), (2, 200)))

    def shares(budget: int, *, oldest_first: bool) -> dict[int, int]:
        chunks = split_budget([first, second], budget, oldest_first=oldest_first)
        return {chunk.sequence.request_id: chunk.n_tokens for chunk in chunks}

    assert shares(64, oldest_first=True) == {1: 64}
    assert shares(64, oldest_first=False) == {2: 64}
    assert shares(128, oldest_first=True) == shares(128, oldest_first=False) == {1: 64, 2: 64}
    assert shares(192, oldest_first=True) == {1: 128, 2: 64}
    assert shares(256, oldest_first=False) == {1: 128, 2: 128}
    second.n_computed = 195
    assert shares(64, oldest_first=False) == {1: 59, 2: 5}, "what is left of a tile is not lost"


def test_the_second_row_counts_as_a_step_until_it_is_measured() -> None:
    pace = Pace(1.0, 64)
    pace.measured(1, 0, 0.01)
    assert pace.decode_seconds(2) == pytest.approx(0.02)
    assert 0.02 < pace.decode_seconds(8) < 0.03
    pace.measured(2, 0, 0.012)
    assert pace.decode_seconds(2) == pytest.approx(0.012)
    assert pace.decode_seconds(8) < 0.02


def test_fewer_rows_take_no_longer_than_more_do() -> None:
    """While all steps have guesses, none is measured without them."""
    pace = Pace(1.0, 64)
    pace.measured(1, 0, 0.02)
    pace.measured(4, 0, 0.01)
    assert pace.decode_seconds(1) == pytest.approx(0.02 - 0.03 * 0.01)
    pace.measured(4, 0, 0.01)
    assert pace.decode_seconds(1) == pytest.approx(0.01 + 0.97**2 * 0.01)
    pace.measured(1, 0, 0.9)
    assert pace.decode_seconds(4) == 0.01, "fewer rows tell nothing of more"


def test_the_time_of_other_numbers_of_rows_is_interpolated() -> None:
    pace = Pace(1.0, 64)
    pace.measured(2, 0, 0.02)
    pace.measured(6, 0, 0.04)
    pace.measured(9, 0, 0.1)
    assert pace.decode_seconds(3) == pytest.approx(0.025)
    assert pace.decode_seconds(5) == pytest.approx(0.035)
    assert pace.decode_seconds(7) == pytest.approx(0.06)
    assert pace.decode_seconds(19) == pytest.approx(0.1 + 10 * 0.02 * 0.1)


def test_the_cost_of_rows_that_are_not_computed_is_forgotten_slowly() -> None:
    pace = Pace(1.0, 64)
    pace.measured(2, 0, 0.02)
    pace.measured(3, 0, 0.9)
    pace.forget_beyond(2)
    likely = 0.02 + 0.02 * 0.02
    assert pace.decode_seconds(2) == 0.02
    assert pace.decode_seconds(3) == pytest.approx(0.9 - 0.03 * (0.9 - likely))


def test_other_work_gets_as_much_time_as_the_projector() -> None:
    pace = Pace(1.0, 64)
    may_encode = [pace.may_encode]
    pace.encoded(0.5)
    pace.encoded(0.5)
    for n_decoding, n_prompt, seconds in ((1, 0, 0.6), (0, 64, 0.4)):
        pace.measured(n_decoding, n_prompt, seconds)
        may_encode.append(pace.may_encode)
    assert may_encode == [True, False, True]


def test_the_longest_prompt_sets_the_cost_of_a_token() -> None:
    pace = Pace(1.0, 64)
    pace.measured(0, 2, 0.02)
    assert pace.seconds_per_prompt_token == pytest.approx(0.01)
    pace.measured(1, 64, 0.3)
    assert pace.seconds_per_prompt_token == pytest.approx(0.01), "beside a stream they cost more"
    pace.measured(0, 64, 0.3)
    assert pace.seconds_per_prompt_token == pytest.approx(0.3 / 64)
    pace.measured(0, 63, 0.1)
    assert pace.seconds_per_prompt_token == pytest.approx(0.3 / 64), "a shorter one tells it worse"
    pace.measured(0, 64, 0.1)
    assert pace.seconds_per_prompt_token == pytest.approx(0.1 / 64)
    first = Pace(1.0, 64)
    first.measured(2, 8, 0.1)
    assert first.seconds_per_prompt_token == pytest.approx(0.1 / 10), "better than nothing"


def test_a_pass_takes_as_long_as_the_shortest_step() -> None:
    pace = Pace(1.0, 64)
    assert pace.seconds_per_pass == 0
    pace.measured(3, 0, 0.03)
    pace.measured(1, 0, 0.02)
    assert pace.seconds_per_pass == 0.02


def test_rows_that_never_ran_alone_take_the_time_that_prompts_leave() -> None:
    pace = Pace(1.0, 640)
    pace.measured(2, 64, 0.4)
    assert pace.decode_seconds(2) == pytest.approx(0.04), "a tenth, if nothing tells more"
    pace.measured(0, 64, 0.064)
    pace.measured(4, 64, 0.164)
    assert pace.decode_seconds(4) == pytest.approx(0.1)
    pace.measured(8, 64, 0.05)
    assert pace.decode_seconds(8) == pytest.approx(0.1 + 4 * 0.02 * 0.1), "more than fewer rows"
