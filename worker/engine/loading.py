"""What a start of the engine loads: the plan of its memory, the weights, the context."""

from __future__ import annotations

import time
from pathlib import Path

from worker.devices.cpu.budget import CpuBudget, cpu_budget
from worker.devices.plan import memory
from worker.devices.plan.placement import tensor_placement
from worker.devices.select import Selected
from worker.errors import InsufficientVram, VramOom
from worker.llama.adapter import LoraAdapter
from worker.llama.context import Context
from worker.llama.model import LoadOptions, Model
from worker.models.gguf.header import GgufHeader, read_header
from worker.observability.logs import get_logger
from worker.wire.engine_settings import EngineSettings
from worker.wire.messages import LoadModel, Progress
from worker.wire.transport import SyncChannel

log = get_logger()

_PROGRESS_SECONDS = 0.1


def cpu_budget_of(settings: EngineSettings) -> CpuBudget:
    budget = cpu_budget(settings.threads)
    log.info(
        "engine.cpu_budget",
        threads=budget.threads,
        derivation=budget.derivation,
        memory_limit_bytes=budget.memory_limit_bytes,
    )
    return budget


def plan_of(
    config: LoadModel, header: GgufHeader, selected: Selected, budget: CpuBudget
) -> memory.Plan:
    draft = read_header(Path(config.draft.path)) if config.draft else None
    beside = memory.Beside(config.adapter.size_bytes if config.adapter else 0, draft)
    device, settings = selected.device, config.engine
    return memory.plan(header, settings, device, budget, config.model_ref, beside)


def load_model(
    config: LoadModel,
    channel: SyncChannel,
    selected: Selected,
    plan: memory.Plan,
    header: GgufHeader,
) -> Model:
    began = last = time.monotonic()

    def progressed(fraction: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PROGRESS_SECONDS or fraction >= 1.0:
            last = now
            rate = fraction * plan.parts["weights"] / max(now - began, 1e-3)
            channel.send([Progress("load", round(100 * fraction, 1), rate)])

    options = LoadOptions(
        device=selected.device,
        mmap=config.engine.maps_file,
        mlock=config.engine.mlock,
        tensor_placement=tensor_placement(header, selected.device),
    )
    return Model(config.model_path, options, progressed)


def create_context(
    config: LoadModel, model: Model, plan: memory.Plan, threads: int, embeds: bool
) -> Context:
    """With the adapter, which llama.cpp wants loaded before the context is there."""
    adapter = None
    if config.adapter is not None:
        adapter = LoraAdapter(model, config.adapter.path, config.adapter.scale)
    kv = memory.KvCache(plan.kv_cells, plan.context_length, plan.kv_unified)
    options = memory.context_options(config.engine, kv, threads=threads, embeds=embeds)
    try:
        context = Context(model, options)
    except VramOom as error:
        raise InsufficientVram(error.message, parts=dict(plan.parts)) from error
    if adapter is not None:
        adapter.use_in(context)
    return context
