"""Plans and loads a model as the engine does, in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.devices.fixtures import Given
from worker.devices.cpu.budget import CpuBudget, cpu_budget
from worker.devices.plan import memory
from worker.devices.plan.cells import KvCache, a_part_each, context_options
from worker.devices.plan.placement import load_options
from worker.devices.plan.plan import Plan
from worker.devices.residency import proof
from worker.devices.select import Selected, select_device
from worker.llama.context import Context
from worker.llama.model import Model
from worker.models.gguf.header import read_header
from worker.wire.engine_info import Residency


def planned(source: Given, budget: CpuBudget | None = None, adapters: Sequence[Path] = ()) -> Plan:
    header, selected = read_header(source.model_path), select_device(source.settings)
    request = memory.PlanRequest(
        header,
        source.settings,
        selected.devices,
        budget or cpu_budget(1),
        "model",
        adapters=tuple(map(read_header, adapters)),
    )
    return memory.plan(request)


@dataclass(frozen=True, slots=True)
class Loaded:
    source: Given
    selected: Selected
    model: Model
    context: Context

    def prove(self, selected: Selected | None = None, head: Context | None = None) -> Residency:
        """Prove that it is on the devices on which it was loaded, or on the given ones."""
        header = read_header(self.source.model_path)
        return proof.prove(self.context, selected or self.selected, header, head)


@contextmanager
def loaded(
    source: Given,
    plan: Plan | None = None,
    adapters: Sequence[Path] = (),
    *,
    offload_kv: bool = True,
    **options: Any,
) -> Iterator[Loaded]:
    """Load the model as the engine does, except for `options`; without a plan, 256 tokens a
    slot."""
    header, selected = read_header(source.model_path), select_device(source.settings)
    load = load_options(
        header,
        selected.devices,
        layers=plan.layers if plan else (),
        mmap=not selected.is_gpu,
        mlock=source.settings.mlock,
    )
    kv = a_part_each(source.settings, source.settings.context_length or 256)
    if plan is not None:
        kv = KvCache(plan.kv_cells, plan.context_length, plan.kv_unified)
    embeds = header.pooling is not None
    wanted = context_options(source.settings, kv, threads=1, embeds=embeds)
    wanted = replace(wanted, offload=wanted.offload and offload_kv)
    with closing(Model(source.model_path, replace(load, **options))) as model:
        for file in adapters:
            model.load_adapter(str(file))
        with closing(Context(model, wanted)) as context:
            yield Loaded(source, selected, model, context)
