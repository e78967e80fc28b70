"""A worker's status, for tests of its readers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from worker.supervisor.status import NO_STATS, WorkerStatus
from worker.wire.messages import Progress

_READY = WorkerStatus(
    state="ready",
    progress=Progress("ready", 100.0),
    uptime_seconds=1.0,
    slots=8,
    running=0,
    queued=0,
    queued_prompt_tokens=0,
    stalled_seconds=0.0,
    is_stalled=False,
    resident=True,
    residency_lost=None,
    error=None,
    info=None,
    stats=NO_STATS,
    crashes=(),
)


def ready_status(**fields: Any) -> WorkerStatus:
    """The status of an idle worker, except for the given fields."""
    return replace(_READY, **fields)
