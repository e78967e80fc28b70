"""The scheduler's limits: slots, cells, rows of a batch, prompt tokens of a step."""

from __future__ import annotations

from dataclasses import dataclass

from worker.wire.engine_info import EngineInfo
from worker.wire.engine_settings import EngineSettings

_CPU_COPY_RATE, _GPU_COPY_RATE = 4e9, 100e9
"""Assumed rates of copies inside the device's memory, in bytes per second."""


@dataclass(frozen=True, slots=True)
class Limits:
    n_slots: int
    n_cells: int
    """KV cells of all slots together."""
    batch: int
    """Rows in one batch."""
    prefill_alone: int
    """Prompt tokens in a step without running streams."""
    prefill_budget: int
    """The most prompt tokens in a step with running streams."""
    inter_token_target: float = 3600.0
    """Seconds that a step beside running streams shall take at most."""
    tiled: bool = False
    """Whether prompts are fitted to the attention's tiles, which matter on a CPU alone."""
    prefix_cache: bool = True
    unified: bool = False
    """Whether slots share cells. Otherwise a copy always copies a slot's whole memory."""
    copy_seconds: float = 0.0
    """The time of such a copy."""
    snapshot_bytes: int = 0
    """The most bytes of all snapshots; 0 disables them."""
    shelf_bytes: int = 0
    """The most bytes of states copied out of one pool of cells; 0 disables that."""


def limits_of(info: EngineInfo, settings: EngineSettings) -> Limits:
    """The limits of an engine that has started."""
    # llama.cpp copies a slot's whole part of a split cache, however few tokens are wanted.
    rate = _GPU_COPY_RATE if settings.on_gpu else _CPU_COPY_RATE
    copy_seconds = 0.0 if info.kv_unified else info.plan["kv"] / info.slots / rate
    return Limits(
        n_slots=info.slots,
        n_cells=info.kv_cells,
        batch=info.batch,
        prefill_alone=max(info.micro_batch, settings.prefill_budget),
        prefill_budget=settings.prefill_budget,
        inter_token_target=settings.inter_token_ms / 1000,
        tiled=not settings.on_gpu,
        prefix_cache=settings.prefix_cache,
        snapshot_bytes=settings.snapshot_mib << 20,
        shelf_bytes=info.shelf_bytes,
        unified=info.kv_unified,
        copy_seconds=copy_seconds,
    )
