"""The scheduler's limits: slots, cells, rows of a batch, prompt tokens of a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from worker.devices.plan.cells import divided
from worker.engine.model_runner import ModelRunner
from worker.llama.memory_kind import MemoryKind
from worker.wire.engine_info import EngineInfo
from worker.wire.engine_settings import EngineSettings

_CPU_COPY_RATE, _GPU_COPY_RATE = 4e9, 100e9
"""Assumed rates of copies inside the device's memory, in bytes per second."""
_STEP_SECONDS = 0.25
"""By default, a step of prompts alone has several micro-batches only if it takes no longer than
this: new requests wait for its end."""


@dataclass(frozen=True, slots=True)
class Limits(MemoryKind):
    n_slots: int
    n_cells: int
    """KV cells of all slots together."""
    batch: int
    """Rows in one batch."""
    prefill_budget: int
    """The most prompt tokens in a step."""
    inter_token_seconds: float = 3600.0
    """The target time of a step beside running streams."""
    prefix_cache: bool = True
    unified: bool = False
    """Whether slots share one pool of cells. Otherwise a copy always copies a slot's whole part."""
    copy_seconds: float = 0.0
    """The time of a copy in a split pool."""
    memory_bytes: int = 0
    """The most bytes of states and snapshots in the host's memory; 0 disables them."""
    cell_bytes: float = 1.0
    """The expected bytes of a cell in a state, before one was copied."""

    @property
    def longest(self) -> int:
        """The cells that one slot can have."""
        return self.n_cells if self.unified else self.n_cells // self.n_slots

    @property
    def one_pass(self) -> bool:
        """Whether all rows of a batch are computed in one pass; otherwise a pass has the same
        number of rows of each sequence."""
        return self.unified and not self.recurrent


def prefill_budget(settings: EngineSettings, seconds_per_token: float) -> int:
    """The most prompt tokens of a step: the configured number, or as many micro-batches as are
    computed within `_STEP_SECONDS`, so that a fast device loses little time between steps.

    `seconds_per_token` is the device's time for a token of a micro-batch; 0 if unknown.
    """
    if settings.prefill_budget is not None:
        return settings.prefill_budget
    most, piece = settings.batch, min(settings.micro_batch, settings.batch)
    soon = int(_STEP_SECONDS / seconds_per_token) if seconds_per_token else piece
    return max(min(soon, most) // piece, 1) * piece


def limits_of(
    info: EngineInfo, settings: EngineSettings, runner: ModelRunner
) -> tuple[Limits, ...]:
    """The limits of an engine that has started, for each layout of its cells, the best first."""
    rate = _GPU_COPY_RATE if settings.on_gpu else _CPU_COPY_RATE

    def laid_out(n_slots: int, n_cells: int, *, unified: bool) -> Limits:
        return Limits(
            n_slots=n_slots,
            n_cells=n_cells,
            batch=info.batch,
            prefill_budget=info.prefill_budget,
            inter_token_seconds=settings.inter_token_ms / 1000,
            prefix_cache=settings.prefix_cache,
            unified=unified,
            **asdict(runner.memory_kind),
            # llama.cpp copies a slot's whole part of a split cache, however few tokens are wanted.
            copy_seconds=0.0 if unified else info.plan["kv"] / n_slots / rate,
            memory_bytes=info.memory_bytes,
            cell_bytes=info.plan["kv"] / info.kv_cells,
        )

    parts = [laid_out(n, divided(info.kv_cells, n).cells, unified=False) for n in info.kv_divisions]
    return (*parts, laid_out(info.slots, info.kv_cells, unified=info.kv_unified))
