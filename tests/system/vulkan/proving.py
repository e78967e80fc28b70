"""A process that plans, loads and proves a model on Vulkan devices, and tells what it found.

`python -m tests.system.vulkan.proving MODEL SETTINGS`: SETTINGS is a JSON object of settings.
Prints one JSON object; then, for each line on its standard input, what the live check says.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from worker.devices.cpu.budget import cpu_budget
from worker.devices.plan import memory
from worker.devices.plan.cells import KvCache, context_options
from worker.devices.plan.placement import load_options
from worker.devices.residency import live_check, proof
from worker.devices.select import select_device
from worker.errors import WorkerError
from worker.llama.context import Context
from worker.llama.model import Model
from worker.models.gguf.header import read_header
from worker.wire.engine_settings import EngineSettings


def main(path: str, given: dict[str, Any]) -> None:
    if "vulkan_device" in given:
        given["vulkan_device"] = tuple(given["vulkan_device"])
    settings, header = EngineSettings("vulkan", **given), read_header(path)
    selected = select_device(settings)
    plan = memory.plan(header, settings, selected.devices, cpu_budget(1), "model")
    options = load_options(header, selected.devices, layers=plan.layers, mmap=False)
    model = Model(path, options)
    cells = KvCache(plan.kv_cells, plan.context_length, plan.kv_unified)
    embeds = header.pooling is not None
    context = Context(model, context_options(settings, cells, threads=1, embeds=embeds))
    found = proof.prove(context, selected, header, locked=False)
    shares = [
        {
            "device": share.device,
            "planned": share.needed_bytes - share.parts["margin"],
            "held": found.bytes_on(share.device),
        }
        for share in plan.shares
    ]
    told = {"resident": found.resident, "watched": found.watched, "layers": plan.layers}
    rows = min(settings.micro_batch, plan.kv_cells)
    tell(told | {"shares": shares, "layer_output": 4 * rows * (header.embedding_length or 0)})
    for _ in sys.stdin:
        live_check.check(selected, found)
        tell({"resident": True})


def tell(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], json.loads(sys.argv[2]))
    except WorkerError as error:
        tell({"code": error.code, "exit_code": error.exit_code, "message": error.message})
