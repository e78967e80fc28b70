"""The engine process on a device that plays the GPU: `… gpu_engine PLUG_IN@host:port --fd N`."""

from __future__ import annotations

import sys

from tests.support.devices import rpc_device
from worker.engine import process

if __name__ == "__main__":
    rpc_device.register(sys.argv.pop(1))
    rpc_device.play_gpu()
    process.main()
