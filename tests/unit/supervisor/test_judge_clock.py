"""A pause of the judging process does not count as time in which the engine could have answered."""

from __future__ import annotations

import pytest

from worker.supervisor.judge_clock import JudgeClock


@pytest.mark.parametrize("pause", [1.5, 60.0, 1e6])
def test_a_pause_counts_as_one_tick_however_long(pause: float) -> None:
    now = 100.0
    clock = JudgeClock(1.0, lambda: now)
    began = clock.now()
    for _ in range(10):
        now += 0.25
        clock.tick()
    assert clock.now() - began == pytest.approx(2.5), "it goes on as time does"
    now += pause
    assert clock.now() - began == 3.5, "before its next tick, too"
    clock.tick()
    now += 0.5
    assert clock.now() - began == 4.0
