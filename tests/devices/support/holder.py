"""A process that holds a model on a device and proves it again whenever it is asked.

`python -m tests.devices.support.holder MODEL SETTING`: prints one JSON line after the load and one
for each line on its standard input.
"""

from __future__ import annotations

import json
import sys

from worker.devices import memory, residency
from worker.devices.probe import select_device
from worker.errors import ResidencyViolation
from worker.llama.context import Context
from worker.llama.model import LoadOptions, Model
from worker.messages import EngineConfig
from worker.models.gguf import read_header


def main(path: str, setting: str) -> None:
    config = EngineConfig("cuda", path, "model", "w", slots=1, rpc_endpoint=setting)
    selected, header = select_device(config), read_header(path)
    placement = residency.tensor_placement(selected, header)
    model = Model(path, LoadOptions(device=selected.device, mmap=False, tensor_placement=placement))
    context = Context(model, memory.context_options(config, 256, threads=1, embeds=False))
    proof = residency.prove(model, context, selected, config)
    _tell("resident")
    for _ in sys.stdin:
        try:
            residency.prove_again(proof, selected, config)
            _tell("resident")
        except ResidencyViolation as error:
            _tell(error.message)


def _tell(text: str) -> None:
    print(json.dumps(text), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
