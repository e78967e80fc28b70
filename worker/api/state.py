"""What every route reads: the collaborators of the HTTP surface, handed in by `lifecycle`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from worker.engine.supervisor import Supervisor
from worker.observability.metrics import Metrics
from worker.settings import Settings


@dataclass(slots=True)
class AppState:
    """Lives on the API process's event loop; nothing in it is shared with another thread."""

    settings: Settings
    supervisor: Supervisor
    metrics: Metrics
    worker_id: str
    model_ref: str
    incarnation: str
    started_at: float
    """On the `time.monotonic()` clock."""
    request_shutdown: Callable[[], None]
    draining: Callable[[], bool]
