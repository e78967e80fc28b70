"""The engine process as its parent sees it: send commands, receive frames, end it for certain."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable

from worker.supervisor.spawn import BegunEngine
from worker.wire.async_channel import AsyncChannel
from worker.wire.messages import Command, Event

KILL_WAIT_SECONDS = 5.0
"""A process inside a driver call may take a moment to die of SIGKILL."""


class EngineProcess:
    """One incarnation of the engine. `on_frame` gets its frames; `lost` is set once it is gone."""

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
        """Send SIGKILL, which also works on a suspended or stuck process."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> str:
        """Make sure that the process is gone, reap it, and return in words how it ended."""
        # The pipe is closed, so the process is leaving; a core dump may take a moment.
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
