"""The pipe between the API process and the engine process: length-prefixed pickles on a socket.

This module has the wire format (a 4-byte big-endian length, then a pickle) and the engine process's
end; the other end is `async_channel`. One reader thread calls `recv`, any thread calls `send`.
Pickle is safe here: both processes belong to the worker, and the socket pair is private to them.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from typing import Any, cast

from worker.wire.messages import Command, Event

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 30


def encode(message: Any) -> bytes:
    """One frame: the length of the pickle, then the pickle."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


class SyncChannel:
    """The engine process's end, which blocks. One thread may call `recv`, any thread `send`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._reader = sock.makefile("rb")
        self._send_lock = threading.Lock()

    def recv(self) -> Command | None:
        """The next command; `None` once the parent has closed its end or died."""
        try:
            header = self._reader.read(LENGTH.size)
            if len(header) < LENGTH.size:
                return None
            (length,) = LENGTH.unpack(header)
            body = self._reader.read(length)
        except ConnectionError:
            return None
        if len(body) < length:
            return None
        return cast(Command, pickle.loads(body))

    def send(self, events: list[Event]) -> None:
        """Send one frame; raises `ConnectionError` (or `BrokenPipeError`) if the parent is gone."""
        frame = encode(events)
        with self._send_lock:
            self._sock.sendall(frame)

    def close(self) -> None:
        self._reader.close()
        self._sock.close()
