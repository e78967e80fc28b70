"""What every route reads: the collaborators of the HTTP surface, handed in by `lifecycle`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from starlette.requests import Request

from worker.api.turnstile import Turnstile
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
    accepted: Turnstile = field(default_factory=Turnstile)
    """Jobs that the engine has taken go on through it."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """What a client may call the model: the reference, and of a path its last part too."""
        name = self.model_ref.rstrip("/").rsplit("/", 1)[-1]
        return tuple(dict.fromkeys([self.model_ref, name, name.removesuffix(".gguf")]))


def state_of(request: Request) -> AppState:
    state: AppState = request.app.state.worker
    return state


@lru_cache(maxsize=1)
def worker_version() -> str:
    try:
        return version("llorch-worker")
    except PackageNotFoundError:  # a checkout that was not installed
        return "0+unknown"
