"""The worker's state in one record, made by the supervisor and read by everything that tells it.

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
then, and the next request starts one. `failed` is final: the worker leaves with an error, whatever
its engine still does."""
Doing = Literal["waiting", "prompt", "decoding"]
PoolStatus = Literal["loading", "ready", "busy", "sleeping", "draining", "failed"]

NO_STATS = Stats()


@dataclass(frozen=True, slots=True)
class Activity:
    """What is done with one request: counts and times, nothing of its text."""

    doing: Doing
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, that were not computed again."""
    computed_tokens: int
    """Of the prompt, that are in the cells."""
    tokens_out: int
    seconds: float
    """Since it came."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    state: State
    progress: Progress
    """The phase of the start; that of the last start, once the worker is ready."""
    uptime_seconds: float
    slots: int
    """Of the engine, or those that it shall have."""
    running: int
    """Requests that hold a slot."""
    queued: int
    """Clients' requests without a slot."""
    queued_prompt_tokens: int
    stalled_seconds: float
    """How long the engine has owed a step or an acceptance; 0 if it owes none."""
    is_stalled: bool
    """Whether there has been work without progress for the stall timeout."""
    resident: bool
    """Whether an engine serves whose model was proven to be on its device."""
    residency_lost: str | None
    """Why a later proof has failed."""
    error: WorkerError | None
    """What the worker leaves with, once it has `failed`."""
    info: EngineInfo | None
    """Of the engine that serves, or of the last one that did."""
    stats: Stats
    """Of the engine that serves; all 0 without one."""
    crashes: tuple[Crash, ...]
    """The engine's last crashes, newest last."""
    running_adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters of requests that hold a slot."""
    waiting_adapters: tuple[str, ...] = ()
    """Of those that only queued requests have."""
    sleeps_in_seconds: float | None = None
    """When it falls asleep, if nobody asks for anything more; `None` for never."""

    @property
    def is_ready(self) -> bool:
        return self.state in ("ready", "sleeping")

    @property
    def is_busy(self) -> bool:
        return self.running + self.queued > 0

    @property
    def pool_status(self) -> PoolStatus:
        """The state in the terms of a pool manager."""
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
        """What the model holds on its device: nothing without an engine that serves."""
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
