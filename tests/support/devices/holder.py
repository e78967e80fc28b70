"""A process that holds a model on a device and proves it again whenever it is asked.

`python -m tests.support.devices.holder MODEL SETTING`: prints one JSON line after the load and one
for each line on its standard input.
"""

from __future__ import annotations

import json
import sys

from tests.support.devices import rpc_device
from worker.devices.plan.cells import a_part_each, context_options
from worker.devices.plan.placement import tensor_placement
from worker.devices.residency import live_check
from worker.devices.residency import proof as residency
from worker.devices.select import select_device
from worker.errors import ResidencyViolation
from worker.llama.context import Context
from worker.llama.model import LoadOptions, Model
from worker.models.gguf.header import read_header
from worker.wire.engine_settings import EngineSettings


def main(path: str, setting: str) -> None:
    rpc_device.play_gpu()
    settings = EngineSettings("cuda", cuda_device=(rpc_device.register(setting),), slots=1)
    selected, header = select_device(settings), read_header(path)
    placement = tensor_placement(header, selected.devices)
    load = LoadOptions(devices=selected.devices, mmap=False, tensor_placement=placement)
    model = Model(path, load)
    context = Context(
        model,
        context_options(settings, a_part_each(settings, 256), threads=1, embeds=False),
    )
    proof = residency.prove(model, context, selected, header, locked=False)
    _tell("resident")
    for _ in sys.stdin:
        try:
            live_check.check(selected, proof)
            _tell("resident")
        except ResidencyViolation as error:
            _tell(error.message)


def _tell(text: str) -> None:
    print(json.dumps(text), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
