"""A process that plans, loads and proves a model on Vulkan devices, and reports the result.

`python -m tests.system.vulkan.proving MODEL SETTINGS`: SETTINGS is a JSON object of settings.
Prints one JSON object; then, for each line on its standard input, the result of the live check.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.support.devices.fixtures import Given
from tests.support.devices.loads import loaded, planned
from worker.devices.residency import live_check
from worker.errors import WorkerError
from worker.models.gguf.header import read_header
from worker.wire.engine_settings import EngineSettings


def main(path: str, settings: dict[str, Any]) -> None:
    if "vulkan_device" in settings:
        settings["vulkan_device"] = tuple(settings["vulkan_device"])
    source = Given(EngineSettings("vulkan", **settings), path)
    plan = planned(source)
    with loaded(source, plan) as held:
        found = held.prove()
        shares = [
            {
                "device": share.device,
                "planned": share.needed_bytes - share.parts["margin"],
                "held": found.bytes_on(share.device),
            }
            for share in plan.shares
        ]
        report = {"resident": found.resident, "watched": found.watched, "layers": plan.layers}
        rows = min(source.settings.micro_batch, plan.kv_cells)
        layer_output = 4 * rows * (read_header(path).embedding_length or 0)
        tell(report | {"shares": shares, "layer_output": layer_output})
        for _ in sys.stdin:
            live_check.check(held.selected, found)
            tell({"resident": True})


def tell(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], json.loads(sys.argv[2]))
    except WorkerError as error:
        tell({"code": error.code, "exit_code": error.exit_code, "message": error.message})
