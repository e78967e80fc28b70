"""The child of `plan` and `doctor` with a device that plays the GPU."""

from __future__ import annotations

import sys

from tests.support.devices import rpc_device
from worker.devices import preflight_child

if __name__ == "__main__":
    rpc_device.register(sys.argv.pop(1))
    rpc_device.play_gpu()
    preflight_child.main()
