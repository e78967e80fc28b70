"""A worker that ends with its owner: `python -m worker.fleet.child FD BACKEND FLAG…`.

Runs `llorch-<backend>`, and a thread that reads a pipe whose other end only the owner holds.
However the owner ends, the kernel closes that end, and this process kills itself at once.
(Linux's PR_SET_PDEATHSIG follows the spawning thread, not its process, and macOS has no such call.)
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import cast

from worker.wire.backends import BackendName


def watch(death_pipe: int) -> None:
    """Wait until the pipe's other end is closed, then kill this process."""
    while os.read(death_pipe, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    from worker.main import main as run

    death_pipe, backend = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(death_pipe, False)
    threading.Thread(target=watch, args=(death_pipe,), daemon=True).start()
    return run(cast(BackendName, backend), sys.argv[3:])


if __name__ == "__main__":
    sys.exit(main())
