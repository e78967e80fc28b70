"""The engine process as its parent holds it: spawned, spoken to, and certainly ended.

Lives on the event loop of the API process. One instance is one incarnation of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import worker
from worker.engine.transport import AsyncChannel
from worker.messages import Command, Event

ENGINE_ARGV = (sys.executable, "-P", "-m", "worker.engine.process")
KILL_WAIT_SECONDS = 5.0
"""SIGKILL is final, but a process inside a driver call may take a moment to go."""


class EngineProcess:
    """Commands go to `send`; frames come to `on_frame`; `on_lost` is called once, at its end."""

    def __init__(self, process: asyncio.subprocess.Process, channel: AsyncChannel) -> None:
        self._process = process
        self._channel = channel

    @classmethod
    async def spawn(
        cls,
        on_frame: Callable[[list[Event]], None],
        on_lost: Callable[[], None],
        argv: Sequence[str] = ENGINE_ARGV,
    ) -> EngineProcess:
        ours, theirs = socket.socketpair()
        try:
            # The root goes in by PYTHONPATH and the working directory stays out (-P), so that a
            # folder called "worker" where the user happens to stand is never imported.
            root = str(Path(next(iter(worker.__path__))).parent)
            inherited = os.environ.get("PYTHONPATH")
            path = os.pathsep.join([root, inherited]) if inherited else root
            process = await asyncio.create_subprocess_exec(
                *argv,
                "--fd",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # whatever native code prints belongs to the log
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
                # Its own session: a Ctrl-C in the terminal is for us to answer, not for it.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        channel = await AsyncChannel.open(ours, on_frame, on_lost)
        return cls(process, channel)

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
        if self._process.returncode is None:
            # The pipe is closed, so it is leaving; a dump of its core may take a moment.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), 0.5)
        self._channel.close()
        if self._process.returncode is None:
            self.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), KILL_WAIT_SECONDS)
        return describe(self._process.returncode)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode


def describe(returncode: int | None) -> str:
    """How a process ended: `killed by SIGABRT`, `exit code 3`."""
    if returncode is None:
        return "still there after SIGKILL"
    if returncode < 0:
        try:
            return f"killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"killed by signal {-returncode}"
    return f"exit code {returncode}"
