"""Chooses the number of workers by the load: all requests divided by the target for each worker.

Serve's controller calls the policy ten times a second with the last report of each replica
(`WorkerReplica.record_autoscaling_stats`). It clamps the result to the group's minimum and maximum,
and acts once the result has pointed the same way for the group's delay. Serve's own count covers
calls through its handles, which carry no requests here. This module imports nothing from Ray or
this package, because Serve pickles it by value.
"""

from __future__ import annotations

from typing import Any

REQUESTS = "llorch_requests"
"""The name under which a replica reports its worker's requests, waiting and running."""


class RequestsPerWorker:
    """Enough workers for each to have `target` requests."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The number of workers, from Serve's `AutoscalingContext`, and an empty state."""
        reported = (context.aggregated_metrics or {}).get(REQUESTS, {})
        if not reported:  # no report yet, so no change
            return float(context.target_num_replicas), {}
        return sum(reported.values()) / self._target, {}
