"""Starts an engine process, with as few imports as possible.

The first engine starts before the API process knows its settings, so that both processes import
their modules at the same time. It then waits for its first command. Runs in the API process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import worker
from worker.wire.black_box import BlackBox

ENGINE_ARGV: Sequence[str] = (sys.executable, "-P", "-m", "worker.engine.process")
ENVIRONMENT_PREFIXES = (
    *("PATH", "HOME", "USER", "LANG", "LC_", "TZ", "TMPDIR", "XDG_", "PYTHON", "VIRTUAL_ENV"),
    *("LD_", "DYLD_", "MALLOC_", "GLIBC_", "ASAN_", "UBSAN_", "OMP_", "GOMP_", "KMP_"),
    *("MKL_", "OPENBLAS_", "BLIS_", "VECLIB_", "GGML_", "LLAMA_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "MTL_", "METAL_"),
)
"""Prefixes of the variables that the engine inherits; its settings come through the pipe."""
SPINS_AT_BARRIERS = "1000"
"""How often an OpenMP thread looks before it sleeps at a barrier: for some 10 µs, by libgomp's own
estimate.

libgomp's default lasts milliseconds. It is no faster on idle cores, and beside a process that keeps
a core busy a token takes ten times as long with it (`streams1`, `busy1` of `make bench`).
"""


@dataclass(frozen=True, slots=True)
class BegunEngine:
    """An engine process that imports its modules and waits for its first command."""

    process: subprocess.Popen[bytes]
    pipe: socket.socket
    black_box: BlackBox

    def __enter__(self) -> BegunEngine:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill and reap the process."""
        self.pipe.close()
        self.process.kill()
        self.process.wait()


def begin_engine(argv: Sequence[str] | None = None) -> BegunEngine:
    """Start an engine process. It exits when the pipe is closed."""
    ours, theirs = socket.socketpair()
    file = BlackBox.create_file()
    try:
        black_box = BlackBox(file)
        process = subprocess.Popen(
            [*(argv or ENGINE_ARGV), "--fd", str(theirs.fileno()), "--black-box", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what native code prints goes to the log
            pass_fds=[theirs.fileno(), file],
            env=engine_environment(),
            # A session of its own keeps Ctrl-C in the terminal from the engine: the worker handles
            # it.
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(file)
    return BegunEngine(process, ours, black_box)


def engine_environment() -> dict[str, str]:
    """The engine's environment: what compute libraries and Python read, and no secret."""
    allowed = {
        name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT_PREFIXES)
    }
    if "OMP_WAIT_POLICY" not in allowed:
        allowed.setdefault("GOMP_SPINCOUNT", SPINS_AT_BARRIERS)
    # PYTHONPATH has the package's root, and -P excludes the working directory: a folder called
    # "worker" there is never imported.
    root = str(Path(next(iter(worker.__path__))).parent)
    inherited = os.environ.get("PYTHONPATH")
    allowed["PYTHONPATH"] = os.pathsep.join([root, inherited]) if inherited else root
    return allowed
