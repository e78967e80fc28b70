"""What the worker did in the last hour, in steps of ten seconds, for its status page.

It comes from the same counters as `/metrics`. Runs on the API process's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, get_args

from worker.observability.metrics import Metrics
from worker.wire.messages import CacheTier

STEP_SECONDS = 10.0
KEPT_SECONDS = 3600.0
QUANTILES = {"p50": 0.5, "p95": 0.95}
LATENCIES = {
    "first_token": "worker_time_to_first_token_seconds",
    "inter_token": "worker_inter_token_seconds",
}
Buckets = tuple[tuple[float, float], ...]
"""A histogram: each upper edge, and the number of observations up to it since the start."""
Row = dict[str, float | None]


class _Sample(NamedTuple):
    """The counters at one time."""

    at: float
    """On the monotonic clock."""
    counts: dict[str, float]
    buckets: dict[str, Buckets]


class History:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._rows: deque[Row] = deque(maxlen=round(KEPT_SECONDS / STEP_SECONDS))
        self._last: _Sample | None = None

    async def keep(self, status: Callable[[], Any]) -> None:
        """Take a sample now and every ten seconds, until cancelled."""
        while True:
            self.take(status(), time.time(), time.monotonic())
            await asyncio.sleep(STEP_SECONDS)

    def take(self, status: Any, at: float, now: float) -> None:
        """Take a sample of a `WorkerStatus` and of the counters. Each one but the first completes
        a row: rates and quantiles of the step, and gauges at its end. `at` is the row's Unix time;
        rates use the monotonic `now`, because that clock is never adjusted."""
        buckets = {name: self._metrics.buckets(key) for name, key in LATENCIES.items()}
        before, self._last = self._last, _Sample(now, _counts(self._metrics), buckets)
        if before is None:
            return
        stats, seconds = status.stats, max(now - before.at, 1e-3)
        n_used = stats.kv_cells_used - stats.kv_cells_cached
        row: Row = {
            "at": round(at, 1),
            "running": status.running,
            "waiting": status.queued,
            "cells_used": _percent(n_used, stats.kv_cells_total),
            "cells_cached": _percent(stats.kv_cells_cached, stats.kv_cells_total),
        }
        for name, n in self._last.counts.items():
            row[f"{name}_per_second"] = round((n - before.counts[name]) / seconds, 2)
        for name, after in buckets.items():
            for label, q in QUANTILES.items():
                found = quantile(before.buckets[name], after, q)
                row[f"{name}_ms_{label}"] = found and round(1000 * found, 3)
        self._rows.append(row)

    def columns(self, names: Iterable[str]) -> dict[str, list[float | None]]:
        """The rows as columns with these names.

        A quantile is `None` if nothing was observed. Cells are percentages of all cells.
        """
        return {name: [row[name] for row in self._rows] for name in names}


def prompt_tokens(metrics: Metrics) -> dict[str, float]:
    """Tokens of all prompts started so far: those found in each tier, and those `computed`."""
    value = metrics.value
    found = {tier: value("worker_tokens_reused_total", tier=tier) for tier in get_args(CacheTier)}
    return found | {"computed": value("vllm:prefix_cache_queries_total") - sum(found.values())}


def _counts(metrics: Metrics) -> dict[str, float]:
    prompts = {f"prompt_{tier}": n for tier, n in prompt_tokens(metrics).items()}
    return {"tokens": metrics.value("worker_tokens_generated_total"), **prompts}


def quantile(before: Sequence[tuple[float, float]], after: Buckets, q: float) -> float | None:
    """A quantile of the observations between two states of a histogram, linear inside a bucket.

    As in Prometheus' `histogram_quantile`, it is the last edge for values beyond that.
    """
    grown = [(edge, n - b) for (edge, n), (_, b) in zip(after, before, strict=True)]
    total = grown[-1][1]
    if total <= 0:
        return None
    floor, below = 0.0, 0.0
    for edge, count in grown[:-1]:
        if count >= q * total:
            return floor + (edge - floor) * (q * total - below) / max(count - below, 1e-9)
        floor, below = edge, count
    return floor


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 2) if whole else 0.0
