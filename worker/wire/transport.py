"""The pipe between the API process and the engine process: length-prefixed pickles on a socket.

Owns the wire format (a 4-byte big-endian length, then a pickle) and both of its ends.
`SyncChannel` lives in the engine process: its reader thread calls `recv`, any thread `send`.
`AsyncChannel` lives on the event loop of the API process and hands each frame to a callback as
soon as it is whole, so that a frame costs one wake-up. Both processes are ours and the socket
pair is private to them, which is what makes pickle safe here.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, cast

from worker.wire.messages import Command, Event

_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 30


def encode(message: Any) -> bytes:
    """One frame: the length of the pickle, then the pickle."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class SyncChannel:
    """The engine process's end, blocking. `recv` is for one thread, `send` for any."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._reader = sock.makefile("rb")
        self._send_lock = threading.Lock()

    def recv(self) -> Command | None:
        """The next command; `None` once the parent has closed its end or died."""
        try:
            header = self._reader.read(_LENGTH.size)
            if len(header) < _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack(header)
            body = self._reader.read(length)
        except ConnectionError:
            return None
        if len(body) < length:
            return None
        return cast(Command, pickle.loads(body))

    def send(self, events: list[Event]) -> None:
        """Write one frame; raises `ConnectionError` (or `BrokenPipeError`) without a parent."""
        frame = encode(events)
        with self._send_lock:
            self._sock.sendall(frame)

    def close(self) -> None:
        self._reader.close()
        self._sock.close()


class AsyncChannel(asyncio.Protocol):
    """The API process's end. `on_frame` gets each list of events, `on_lost` is called once."""

    def __init__(
        self, on_frame: Callable[[list[Event]], None], on_lost: Callable[[], None]
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

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
        """Queue one command; dropped silently once the engine is gone (`on_lost` tells)."""
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
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                self.close()
                return
            body = start + _LENGTH.size
            if len(buffer) - body < length:
                break
            with memoryview(buffer) as view:
                events = pickle.loads(view[body : body + length])
            start = body + length
            self._on_frame(events)
        if start:
            del buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()
