"""The engine process as its parent holds it: begun, spoken to, and certainly ended.

The first one is begun before the API process has imported its own modules, which takes as long.
From then on it lives on the event loop of the API process; one instance is one incarnation.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import worker
from worker.wire.black_box import BlackBox
from worker.wire.messages import Command, Event
from worker.wire.transport import AsyncChannel

ENGINE_ARGV: Sequence[str] = (sys.executable, "-P", "-m", "worker.engine.process")
ENVIRONMENT_PREFIXES = (
    *("PATH", "HOME", "USER", "LANG", "LC_", "TZ", "TMPDIR", "XDG_", "PYTHON", "VIRTUAL_ENV"),
    *("LD_", "DYLD_", "MALLOC_", "GLIBC_", "ASAN_", "UBSAN_", "OMP_", "GOMP_", "KMP_"),
    *("MKL_", "OPENBLAS_", "BLIS_", "VECLIB_", "GGML_", "LLAMA_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "MTL_", "METAL_"),
)
"""Variables that the engine inherits begin like this; its settings come through the pipe."""
KILL_WAIT_SECONDS = 5.0
"""SIGKILL is final, but a process inside a driver call may take a moment to go."""


@dataclass(frozen=True, slots=True)
class BegunEngine:
    """An engine process that imports its modules and waits for its first command."""

    process: subprocess.Popen[bytes]
    pipe: socket.socket
    black_box: BlackBox

    def __enter__(self) -> BegunEngine:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever became of the start: no process is left behind."""
        self.pipe.close()
        self.process.kill()
        self.process.wait()


def begin_engine(argv: Sequence[str] | None = None) -> BegunEngine:
    """Start an engine process. It leaves by itself when the pipe is closed."""
    ours, theirs = socket.socketpair()
    file = BlackBox.create_file()
    try:
        black_box = BlackBox(file)
        process = subprocess.Popen(
            [*(argv or ENGINE_ARGV), "--fd", str(theirs.fileno()), "--black-box", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # whatever native code prints belongs to the log
            pass_fds=[theirs.fileno(), file],
            env=engine_environment(),
            # Its own session: a Ctrl-C in the terminal is for us to answer, not for it.
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(file)
    return BegunEngine(process, ours, black_box)


class EngineProcess:
    """Commands go to `send`, frames come to `on_frame`; `lost` is set once, at its end."""

    def __init__(self, begun: BegunEngine, channel: AsyncChannel, lost: asyncio.Event) -> None:
        self.lost = lost
        self.black_box = begun.black_box
        self._process = begun.process
        self._channel = channel

    @classmethod
    async def adopt(
        cls, begun: BegunEngine, on_frame: Callable[[list[Event]], None]
    ) -> EngineProcess:
        lost = asyncio.Event()
        channel = await AsyncChannel.open(begun.pipe, on_frame, lost.set)
        return cls(begun, channel, lost)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        self._channel.send(command)

    def kill(self) -> None:
        """SIGKILL; works on a stopped or wedged process too."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> str:
        """Make sure that it is gone, reap it, and say in words how it ended."""
        # The pipe is closed, so it is leaving; a dump of its core may take a moment.
        left = await self._has_left(0.5)
        self._channel.close()
        if not left:
            self.kill()
            await self._has_left(KILL_WAIT_SECONDS)
        return how_it_ended(self._process.returncode)

    async def _has_left(self, within_seconds: float) -> bool:
        deadline = time.monotonic() + within_seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return self._process.returncode is not None


def engine_environment() -> dict[str, str]:
    """What the engine inherits: what compute libraries and Python read, and no secret."""
    allowed = {
        name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT_PREFIXES)
    }
    # The root goes in by PYTHONPATH and the working directory stays out (-P), so that a folder
    # called "worker" where the user happens to stand is never imported.
    root = str(Path(next(iter(worker.__path__))).parent)
    inherited = os.environ.get("PYTHONPATH")
    allowed["PYTHONPATH"] = os.pathsep.join([root, inherited]) if inherited else root
    return allowed


def how_it_ended(returncode: int | None) -> str:
    """How a process ended: `killed by SIGABRT`, `exit code 3`."""
    if returncode is None:
        return "still there after SIGKILL"
    if returncode < 0:
        try:
            return f"killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"killed by signal {-returncode}"
    return f"exit code {returncode}"
