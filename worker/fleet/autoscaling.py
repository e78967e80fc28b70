"""How many workers the load wants: what waits and runs on all of them, over what each should have.

Serve's controller calls the policy ten times a second with what each replica last reported
(`WorkerReplica.record_autoscaling_stats`), holds its answer between the group's least and most, and
acts on it once it has stood for the group's delay. Serve's own count is of calls through its
handles, which carry no tokens here. Nothing of Ray or of this package is imported: Serve pickles
this module by value.
"""

from __future__ import annotations

from typing import Any

REQUESTS = "llorch_requests"
"""A worker's requests, waiting and running, as its replica reports them."""


class RequestsPerWorker:
    """As many workers as it takes for each to have `target` requests."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The number, by Serve's `AutoscalingContext`; and nothing to be remembered."""
        reported = (context.aggregated_metrics or {}).get(REQUESTS, {})
        if not reported:  # nobody has said anything yet: no reason to change
            return float(context.target_num_replicas), {}
        return sum(reported.values()) / self._target, {}
