"""The pipe between the API process and the engine process: length-prefixed MessagePack on a socket.

This module has the wire format (a 4-byte big-endian length, then one message) and the engine
process's end; the other end is `async_channel`. One reader thread calls `recv`, any thread calls
`send`. Neither end trusts the other: decoders return only the messages that it is allowed to send,
with fields of the right types, and raise `MALFORMED` for anything else.
"""

from __future__ import annotations

import socket
import struct
import threading

from msgspec import DecodeError, to_builtins
from msgspec.msgpack import Decoder, Encoder

from worker.wire.codec import from_data, to_data, wide_integer, with_wide_integers
from worker.wire.messages import Command, Event

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 28
"""Four times the size of log-probabilities for 131,072 tokens with twenty alternatives each."""


_encoder = Encoder(enc_hook=to_data)
COMMANDS = Decoder(Command, dec_hook=from_data, ext_hook=wide_integer)
EVENTS = Decoder(list[Event], dec_hook=from_data, ext_hook=wide_integer)


def encode(message: Command | list[Event]) -> bytes:
    """One frame: the length of the message, then the message.

    Raises `ValueError`, `TypeError` or `RecursionError` for what cannot be sent: a message larger
    than a frame, half of a surrogate pair, too deeply nested lists, or an integer of more than 64
    bits in a field of a narrower type.
    """
    try:
        body = _encoder.encode(message)
    except OverflowError:
        data = to_builtins(message, enc_hook=to_data, builtin_types=(bytes,))
        body = _encoder.encode(with_wide_integers(data))
        try:
            (EVENTS if isinstance(message, list) else COMMANDS).decode(body)
        except DecodeError as error:
            raise ValueError(f"a wide integer is not allowed here: {error}") from None
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


class SyncChannel:
    """The engine process's blocking end. One thread may call `recv`, any thread `send`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._reader = sock.makefile("rb")
        self._send_lock = threading.Lock()

    def recv(self) -> Command | None:
        """The next command; `None` once the parent has closed its end or died.

        Raises `MALFORMED` for a frame that holds no command.
        """
        try:
            header = self._reader.read(LENGTH.size)
            if len(header) < LENGTH.size:
                return None
            (length,) = LENGTH.unpack(header)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes is over the limit")
            body = self._reader.read(length)
        except ConnectionError:
            return None
        return COMMANDS.decode(body) if len(body) == length else None

    def send(self, events: list[Event]) -> None:
        """Send one frame; raises `ConnectionError` if the parent is gone."""
        frame = encode(events)
        with self._send_lock:
            self._sock.sendall(frame)

    def close(self) -> None:
        self._reader.close()
        self._sock.close()
