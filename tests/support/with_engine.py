"""`llorch-BACKEND` with another module as its engine process: `… with_engine MODULE BACKEND …`."""

from __future__ import annotations

import sys

from worker import cli
from worker.supervisor import engine_process


def command(module: str, backend: str = "cpu") -> list[str]:
    return [sys.executable, "-m", "tests.support.with_engine", module, backend]


if __name__ == "__main__":
    module, backend = sys.argv[1:3]
    del sys.argv[1:3]
    engine_process.ENGINE_ARGV = (sys.executable, "-P", "-m", module)
    getattr(cli, backend)()
