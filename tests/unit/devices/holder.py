"""A process that holds a model on a device and proves its residency again on request.

`python -m tests.unit.devices.holder MODEL SETTING`: prints one JSON line after the load and one
for each line on its standard input.
"""

from __future__ import annotations

import json
import sys

from tests.support.devices import rpc_device
from tests.support.devices.fixtures import Given
from tests.support.devices.loads import loaded
from worker.devices.residency import live_check
from worker.errors import ResidencyViolation
from worker.wire.engine_settings import EngineSettings


def main(path: str, setting: str) -> None:
    rpc_device.play_gpu()
    settings = EngineSettings("cuda", cuda_device=(rpc_device.register(setting),), slots=1)
    with loaded(Given(settings, path)) as held:
        proof = held.prove()
        _tell("resident")
        for _ in sys.stdin:
            try:
                live_check.check(held.selected, proof)
                _tell("resident")
            except ResidencyViolation as error:
                _tell(error.message)


def _tell(text: str) -> None:
    print(json.dumps(text), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
