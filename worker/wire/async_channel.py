"""The API process's end of the pipe, on its event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from worker.wire.codec import MALFORMED
from worker.wire.messages import Command, Event
from worker.wire.transport import EVENTS, LENGTH, MAX_FRAME_BYTES, encode


class AsyncChannel(asyncio.Protocol):
    """`on_frame` gets each list of events once it is complete; `on_lost` is called once."""

    def __init__(
        self, on_frame: Callable[[list[Event]], None], on_lost: Callable[[], None]
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.fault: str | None = None
        """What was wrong with a frame, in words; `None` if nothing was."""

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        on_frame: Callable[[list[Event]], None],
        on_lost: Callable[[], None],
    ) -> AsyncChannel:
        """Attach to a connected socket, which the channel then owns."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(on_frame, on_lost), sock=sock)
        return channel

    def send(self, command: Command) -> None:
        """Queue one command; dropped silently once the engine is gone, which `on_lost` reports."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(command))

    def close(self) -> None:
        """Close at once; commands that the engine has not read yet are lost."""
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                return self._refuse(f"a frame of {length} bytes is over the limit")
            body = start + LENGTH.size
            if len(buffer) - body < length:
                break
            try:
                # A copy: a failed hook may keep a view of it, and a viewed buffer cannot grow.
                events = EVENTS.decode(buffer[body : body + length])
            except MALFORMED as malformed:
                return self._refuse(str(malformed))
            start = body + length
            self._on_frame(events)
        if start:
            del buffer[:start]

    def _refuse(self, fault: str) -> None:
        """Close at once, as if the engine had died: nothing that it writes can be trusted."""
        self.fault = f"sent a malformed frame ({fault})"
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()
