"""`llorch-cuda` with a device that stands in for a GPU: `… gpu_command PLUG_IN@host:port FLAGS…`.

This process is the real command; only its children are `gpu_child`.
`LOOK_SECONDS` is the interval at which it checks its device.
"""

from __future__ import annotations

import os
import sys

from worker.devices import preflight
from worker.supervisor import engine_process, supervisor

if __name__ == "__main__":
    setting = sys.argv.pop(1)
    child = (sys.executable, "-P", "-m", "tests.support.devices.gpu_child")
    engine_process.ENGINE_ARGV = (*child, "worker.engine.process", setting)
    preflight.CHILD = (*child, "worker.devices.preflight_child", setting)
    supervisor.RESIDENCY_SECONDS = float(os.environ.get("LOOK_SECONDS", 15))
    from worker.cli import cuda

    cuda()
