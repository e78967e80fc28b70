"""The worker's state in one record, made by the supervisor and read by everything that reports it.

`/health`, `/ready`, `/info`, `/metrics`, `/slots`, the page and the heartbeat read this record and
nothing else, so no two of them can disagree. Frozen data, any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from worker.errors import WorkerError
from worker.supervisor.crash_history import Crash
from worker.wire.engine_info import EngineInfo
from worker.wire.messages import Progress, Stats

State = Literal["loading", "ready", "sleeping", "recovering", "draining", "failed"]
"""The state of the whole worker. It takes work when `ready`, and when `sleeping`: it has no engine
then, and the next request starts one. `failed` is final: the worker exits with an error, whatever
its engine still does."""
Doing = Literal["waiting", "prompt", "decoding"]
PoolStatus = Literal["loading", "ready", "busy", "sleeping", "draining", "failed"]

NO_STATS = Stats()


@dataclass(frozen=True, slots=True)
class Activity:
    """What the engine is doing for one request: counts and times, nothing of its text."""

    doing: Doing
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed again."""
    computed_tokens: int
    """Prompt tokens that are in the cells."""
    tokens_out: int
    seconds: float
    """Time since its submission."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    state: State
    progress: Progress
    """The phase of the start; once no engine starts, `ready`, `sleeping` or the last phase."""
    uptime_seconds: float
    slots: int
    """The engine's number; before the first engine is ready, the setting's."""
    running: int
    """Requests that hold a slot."""
    queued: int
    """Clients' requests without a slot."""
    queued_prompt_tokens: int
    stalled_seconds: float
    """How long the engine has owed a step or an acceptance; 0 if it owes none."""
    is_stalled: bool
    """Whether a ready engine has owed one for at least the stall timeout."""
    resident: bool
    """Whether an engine serves and its model was proven to be on its device."""
    residency_lost: str | None
    """Why a later proof failed; `None` if none has."""
    error: WorkerError | None
    """What the worker exits with; `None` unless it has `failed`."""
    info: EngineInfo | None
    """Facts about the last engine that became ready; `None` before the first."""
    stats: Stats
    """The current engine's; all 0 unless one serves."""
    crashes: tuple[Crash, ...]
    """The engine's last crashes, newest last."""
    running_adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters of requests that hold a slot."""
    waiting_adapters: tuple[str, ...] = ()
    """Names of those that only queued requests use."""
    sleeps_in_seconds: float | None = None
    """Time until the worker falls asleep if no request comes; `None` if it never does."""

    @property
    def is_ready(self) -> bool:
        return self.state in ("ready", "sleeping")

    @property
    def is_busy(self) -> bool:
        return self.running + self.queued > 0

    @property
    def pool_status(self) -> PoolStatus:
        """The state in a pool manager's terms."""
        match self.state:
            case "failed" | "draining" | "sleeping" as same:
                return same
            case "ready":
                return "busy" if self.is_busy else "ready"
            case _:
                return "loading"

    @property
    def last_progress_ms(self) -> float:
        return self.stalled_seconds * 1e3

    @property
    def vram_bytes(self) -> int:
        """Bytes that the model holds on its device; 0 unless an engine serves."""
        return self.info.residency.device_bytes if self.info is not None and self.resident else 0

    @property
    def context_length(self) -> int | None:
        return self.info.model.context_length if self.info is not None else None

    @property
    def kv_usage(self) -> float:
        """The share of KV cells that running requests hold."""
        in_use = self.stats.kv_cells_used - self.stats.kv_cells_cached
        return in_use / self.stats.kv_cells_total if self.stats.kv_cells_total else 0.0

    @property
    def load_seconds(self) -> float:
        return self.info.load_seconds if self.info is not None else 0.0
