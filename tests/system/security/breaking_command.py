"""`llorch-BACKEND` whose engine process is `breaking_engine`; the backend is the first argument."""

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
    from worker import cli

    getattr(cli, sys.argv.pop(1))()
