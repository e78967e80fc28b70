"""The last hour, compared with the counters from which it is computed."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.api.dialects.native.answers import History as Columns
from worker.observability.history import KEPT_SECONDS, STEP_SECONDS, History, quantile
from worker.observability.metrics import Metrics
from worker.supervisor.status import NO_STATS

EDGES = (0.1, 0.5, 1.0, 5.0, float("inf"))


@dataclass
class Now:
    running: int = 0
    queued: int = 0
    stats: object = field(default=NO_STATS)


def buckets(values: list[float]) -> tuple[tuple[float, float], ...]:
    return tuple((edge, float(sum(value <= edge for value in values))) for edge in EDGES)


@given(
    earlier=st.lists(st.floats(0, 9)),
    values=st.lists(st.floats(0, 4.9), min_size=1),
    q=st.floats(0.01, 1),
)
def test_a_quantile_lies_in_the_bucket_of_the_true_one(
    earlier: list[float], values: list[float], q: float
) -> None:
    found = quantile(buckets(earlier), buckets(earlier + values), q)
    ranked = sorted(values)
    true = next(v for n, v in enumerate(ranked, 1) if n >= q * len(ranked) - 1e-9)
    at = bisect_left(EDGES, true)
    assert found is not None
    assert (EDGES[at - 1] if at else 0) - 1e-9 <= found <= EDGES[at] + 1e-9


def test_without_observations_there_is_no_quantile() -> None:
    same = buckets([0.3, 0.7])
    assert quantile(same, same, 0.5) is None


def test_columns_are_the_growth_of_the_counters() -> None:
    metrics = Metrics("w")
    history = History(metrics)
    history.take(Now(), 100.0, 0.0)
    metrics.tokens(30, None)
    metrics.looked_up(50, 40, "memory")
    metrics.first_token.observe(0.2)
    history.take(Now(running=3, queued=2), 110.0, 10.0)
    history.take(Now(), 120.0, 20.0)
    columns = history.columns(Columns.__annotations__)
    assert columns["at"] == [110.0, 120.0]
    assert columns["tokens_per_second"] == [3.0, 0.0]
    assert columns["prompt_memory_per_second"] == [4.0, 0.0]
    assert columns["prompt_computed_per_second"] == [1.0, 0.0]
    assert columns["running"] == [3, 0] and columns["waiting"] == [2, 0]
    first, none = columns["first_token_ms_p50"]
    assert first == pytest.approx(175, abs=75) and none is None
    assert columns["inter_token_ms_p95"] == [None, None]


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_is_set_changes_no_rate(jump: float) -> None:
    metrics = Metrics("w")
    history = History(metrics)
    history.take(Now(), 10_000.0, 0.0)
    metrics.tokens(30, None)
    history.take(Now(), 10_010.0 + jump, 10.0)
    assert history.columns(["at", "tokens_per_second"]) == {
        "at": [10_010.0 + jump],
        "tokens_per_second": [3.0],
    }


def test_an_hour_is_kept() -> None:
    history, kept = History(Metrics("w")), int(KEPT_SECONDS / STEP_SECONDS)
    for n in range(kept + 10):
        history.take(Now(), n * STEP_SECONDS, n * STEP_SECONDS)
    times = history.columns(["at"])["at"]
    assert len(times) == kept and times[-1] == (kept + 9) * STEP_SECONDS
