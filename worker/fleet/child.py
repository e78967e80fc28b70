"""A worker that ends with its owner: `python -m worker.fleet.child FD BACKEND FLAG…`.

Runs `llorch-<backend>`, and beside it one thread that reads a pipe whose other end only the owner
has. However the owner ends, the system closes that end, and this process is gone at once. (Linux's
PR_SET_PDEATHSIG would go by the thread that spawned it, and macOS has none.)
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import get_args

from worker.wire.engine_settings import BackendName


def watch(death_pipe: int) -> None:
    """Wait for the pipe's other end to close; then this process ends as if killed."""
    while os.read(death_pipe, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    from worker.cli import main as run

    death_pipe, backend = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(death_pipe, False)
    threading.Thread(target=watch, args=(death_pipe,), daemon=True).start()
    for name in get_args(BackendName):
        if name == backend:
            return run(name, sys.argv[3:])
    raise SystemExit(f"{backend} is not a backend")


if __name__ == "__main__":
    sys.exit(main())
