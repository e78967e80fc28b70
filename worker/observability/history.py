"""What the worker did in the last hour, in steps of ten seconds, for its page.

Made of the same counters as `/metrics`, on the API process's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from worker.observability.metrics import Metrics

STEP_SECONDS = 10.0
KEPT_SECONDS = 3600.0
QUANTILES = {"p50": 0.5, "p95": 0.95}
Buckets = tuple[tuple[float, float], ...]
"""Of a histogram: each upper edge, and the observations up to it since the start."""
Column = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    """Unix time in seconds."""
    tokens_out: float
    running: int
    waiting: int
    cells_used: int
    cells_cached: int
    cells_total: int
    first_token: Buckets
    """In seconds, like the next."""
    inter_token: Buckets


class History:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        n_kept = round(KEPT_SECONDS / STEP_SECONDS) + 1
        self._samples: deque[Sample] = deque(maxlen=n_kept)

    async def keep(self, status: Callable[[], Any]) -> None:
        """Take a sample now and every ten seconds, until cancelled."""
        while True:
            self.take(status(), time.time())
            await asyncio.sleep(STEP_SECONDS)

    def take(self, status: Any, at: float) -> None:
        """Take a sample of a `WorkerStatus` and of the counters."""
        stats, metrics = status.stats, self._metrics
        self._samples.append(
            Sample(
                at,
                metrics.value("worker_tokens_generated_total"),
                status.running,
                status.queued,
                stats.kv_cells_used - stats.kv_cells_cached,
                stats.kv_cells_cached,
                stats.kv_cells_total,
                metrics.buckets("worker_time_to_first_token_seconds"),
                metrics.buckets("worker_inter_token_seconds"),
            )
        )

    def columns(self) -> dict[str, Column]:
        """A row for each step: rates and quantiles of the step, gauges at its end.

        A quantile is `None` where nothing was observed. Cells are per cent of all.
        """
        steps = list(pairwise(self._samples))
        ends = [end for _, end in steps]
        columns: dict[str, Column] = {
            "at": [round(end.at, 1) for end in ends],
            "tokens_per_second": [
                round((end.tokens_out - start.tokens_out) / max(end.at - start.at, 1e-3), 2)
                for start, end in steps
            ],
            "running": [end.running for end in ends],
            "waiting": [end.waiting for end in ends],
            "cells_used": [_percent(end.cells_used, end.cells_total) for end in ends],
            "cells_cached": [_percent(end.cells_cached, end.cells_total) for end in ends],
        }
        for name in ("first_token", "inter_token"):
            for label, q in QUANTILES.items():
                columns[f"{name}_ms_{label}"] = [
                    _milliseconds(quantile(getattr(start, name), getattr(end, name), q))
                    for start, end in steps
                ]
        return columns


def quantile(before: Sequence[tuple[float, float]], after: Buckets, q: float) -> float | None:
    """Of what was observed between two states of a histogram; linear inside a bucket.

    As Prometheus' `histogram_quantile`: beyond the last edge it is that edge.
    """
    grown = [(edge, n - b) for (edge, n), (_, b) in zip(after, before, strict=True)]
    total = grown[-1][1] if grown else 0.0
    if total <= 0:
        return None
    floor, below = 0.0, 0.0
    for edge, count in grown:
        if count >= q * total:
            if edge == float("inf"):
                return floor
            return floor + (edge - floor) * (q * total - below) / max(count - below, 1e-9)
        floor, below = edge, count
    return floor


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 2) if whole else 0.0


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
