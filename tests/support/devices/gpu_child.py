"""A child of `llorch-cuda` with a device that stands in for a GPU: `… gpu_child MODULE SETTING …`.

MODULE is the engine's process, or the child of `plan` and `doctor`; SETTING is `gpu_command`'s.
"""

from __future__ import annotations

import sys
from importlib import import_module

from tests.support.devices import rpc_device

if __name__ == "__main__":
    module, setting = sys.argv[1:3]
    del sys.argv[1:3]
    rpc_device.register(setting)
    rpc_device.play_gpu()
    import_module(module).main()
