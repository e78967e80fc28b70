"""Admits requests: limits their number and their prompt tokens, and refuses quarantined ones."""

from __future__ import annotations

import math

from worker.errors import InvalidRequest, NotReady, QueueFull, ShuttingDown
from worker.observability.metrics import Metrics
from worker.settings import Settings
from worker.supervisor.job import Job
from worker.supervisor.quarantine import Quarantine
from worker.supervisor.status import State
from worker.supervisor.table import JobTable
from worker.wire.messages import Progress


class Admission:
    def __init__(self, settings: Settings, metrics: Metrics, quarantine: Quarantine) -> None:
        self._settings = settings
        self._metrics = metrics
        self._quarantine = quarantine

    def check(self, job: Job, jobs: JobTable, state: State, progress: Progress) -> None:
        """Check that `job` may join `jobs`.

        Raises:
            ShuttingDown, NotReady: the worker takes no work in this state.
            InvalidRequest: the request is in quarantine.
            QueueFull: too many requests, or too many prompt tokens, are waiting.
        """
        if state == "draining":
            raise ShuttingDown("The worker is shutting down and takes no new work.")
        if state != "ready":
            raise NotReady(
                f"The worker is {state}: {progress.phase}, {progress.percent:.0f} %.",
                phase=progress.phase,
                percent=progress.percent,
            )
        if job.is_internal:
            return
        if job.work in self._quarantine:
            self._metrics.request_quarantined()
            message = "This request is suspected of two engine crashes and is refused for now."
            fault = {"field": "prompt", "constraint": "quarantine", "message": message}
            raise InvalidRequest(message, errors=[fault])
        limits = self._settings
        if len(jobs) >= limits.engine.slots + limits.max_queued_requests:
            raise _queue_full(f"{limits.max_queued_requests} requests", jobs)
        if jobs.queued_prompt_tokens >= limits.max_queued_prompt_tokens:
            raise _queue_full(f"{limits.max_queued_prompt_tokens} prompt tokens", jobs)


def _queue_full(limit: str, jobs: JobTable) -> QueueFull:
    pace = jobs.seconds_per_job
    wait = 1 if pace is None else min(max(math.ceil(pace * jobs.queued), 1), 120)
    return QueueFull(f"The queue is full: {limit} are waiting.", retry_after_seconds=wait)
