"""One engine process as its parent sees it: spawn it, send commands, receive frames, end it.

The first engine is spawned before the API process knows its settings, so that both processes import
their modules at the same time; it then waits for its first command. Until `connect`, this module
therefore imports nothing heavy. Runs on the API process's main thread, later on its event loop.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from worker.child_processes import engine_environment, how_it_ended
from worker.errors import WorkerError, system_words
from worker.wire.black_box import BlackBox

if TYPE_CHECKING:
    from worker.wire.async_channel import AsyncChannel
    from worker.wire.messages import Command, Event

ENGINE_ARGV: Sequence[str] = (sys.executable, "-m", "worker.engine.process")
LEAVE_SECONDS = 0.5
"""Time for a process to exit by itself once its pipe is closed; a core dump takes a moment."""
KILL_WAIT_SECONDS = 5.0
"""A process inside a driver call can take a moment to die of SIGKILL."""


class EngineProcess:
    """One incarnation of the engine, from before its spawn to its end."""

    def __init__(self, argv: Sequence[str] | None = None) -> None:
        self._argv = argv
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: AsyncChannel | None = None
        self.heard_at = 0.0
        """When it was spawned or last reported progress, by the guardian's clock."""
        self.ready_at: float | None = None
        """When it became ready: it had decoded a token."""
        self.phase = "preflight"
        self.has_answered = False
        """Whether it has finished a request."""
        self.error: WorkerError | None = None
        """Why it could not start or go on: its own report, or the error of its spawn."""
        self.kill_reason: str | None = None
        self._has_killed = False

    def successor(self) -> EngineProcess:
        """The next incarnation, not spawned yet, of the same command."""
        return EngineProcess(self._argv)

    def spawn(self) -> None:
        """Start the process unless it has been started; it exits when the pipe is closed.

        Raises `WorkerError` if the system has no memory, process or descriptor left for it.
        """
        if self._process is not None:
            return
        with _start_errors(), ExitStack() as finally_, ExitStack() as unless_spawned:
            ours, theirs = socket.socketpair()
            finally_.callback(theirs.close)
            unless_spawned.callback(ours.close)
            file = BlackBox.create_file()
            finally_.callback(os.close, file)
            self._black_box = BlackBox(file)
            unless_spawned.callback(self._black_box.close)
            self._process = subprocess.Popen(
                [*(self._argv or ENGINE_ARGV), "--fd", str(theirs.fileno())]
                + ["--black-box", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what native code prints goes to the log
                pass_fds=[theirs.fileno(), file],
                env=engine_environment(),
                # A session of its own keeps Ctrl-C in the terminal from the engine: the worker
                # handles it.
                start_new_session=True,
            )
            unless_spawned.pop_all()
        self._pipe = ours

    async def connect(self, on_frame: Callable[[list[Event]], None]) -> None:
        """Attach a spawned process to the event loop; `on_frame` is called with each frame.

        Raises as `spawn` does.
        """
        import asyncio

        from worker.wire.async_channel import AsyncChannel

        self.lost = asyncio.Event()
        """Set once the pipe is closed."""
        self.connected_at = time.monotonic()
        with _start_errors():
            self._channel = await AsyncChannel.open(self._pipe, on_frame, self._on_lost)

    def _on_lost(self) -> None:
        if self._channel is not None and self._channel.fault is not None:
            self.kill_reason = self._channel.fault
        self.lost.set()

    @property
    def pid(self) -> int | None:
        """The process id, from the spawn until the process is reaped."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def ready_seconds(self) -> float:
        """How long it has been ready; 0 if it never was."""
        return 0.0 if self.ready_at is None else time.monotonic() - self.ready_at

    @property
    def suspects(self) -> frozenset[int]:
        """Ids of the requests that its threads have in hand, or had when it died."""
        return self._black_box.suspects

    @property
    def pulses(self) -> tuple[int, ...]:
        """Counters of which some change while native code computes; empty unless it serves."""
        serves = self.ready_at is not None and not self.lost.is_set()
        return self._black_box.pulses if serves else ()

    def send(self, command: Command) -> None:
        """Send a command; it is lost if the process has died. Raises as `encode` does."""
        if self._channel is not None:
            self._channel.send(command)

    def kill(self) -> None:
        """Send SIGKILL, which also works on a suspended or stuck process."""
        if self._process is not None:
            self._has_killed = True
            self._process.kill()

    async def end(self) -> str:
        """Make sure that the process is gone, reap it, and return how it ended, in words."""
        if self._process is None:
            return "not spawned"
        has_exited = await self._exits(LEAVE_SECONDS)
        if self._channel is not None:
            self._channel.close()
        if not has_exited:
            self.kill()
            await self._exits(KILL_WAIT_SECONDS)
        self._black_box.close()  # this object is in a cycle, which may not be collected for days
        await self._reap_orphans()
        return how_it_ended(self._process.returncode, by_worker=self._has_killed)

    async def _reap_orphans(self) -> None:
        """Reap the engine's children, which become the worker's own if it is a container's init."""
        import asyncio

        assert self._process is not None
        deadline = time.monotonic() + KILL_WAIT_SECONDS
        with contextlib.suppress(ChildProcessError):  # none are left
            while time.monotonic() < deadline:
                if not os.waitpid(-self._process.pid, os.WNOHANG)[0]:
                    await asyncio.sleep(0.01)

    async def _exits(self, within_seconds: float) -> bool:
        import asyncio

        assert self._process is not None
        deadline = time.monotonic() + within_seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return self._process.returncode is not None

    def close(self) -> None:
        """Kill and reap the process, without an event loop; harmless if there is none."""
        if self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def _start_errors() -> Iterator[None]:
    """Translate errors of the system into `WorkerError`."""
    try:
        yield
    except OSError as error:
        why = system_words(error)
        raise WorkerError(f"The engine process could not be started: {why}.") from error
