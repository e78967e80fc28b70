"""`llorch-cpu` whose engine process is `breaking_engine`."""

from __future__ import annotations

import sys

from worker.supervisor import engine_process

if __name__ == "__main__":
    engine_process.ENGINE_ARGV = (
        sys.executable,
        "-P",
        "-m",
        "tests.system.security.breaking_engine",
    )
    from worker.cli import cpu

    cpu()
