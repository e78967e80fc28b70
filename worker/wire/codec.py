"""What crosses between processes is data: MessagePack or JSON of typed records, checked on arrival.

The records are msgspec Structs and dataclasses. The one class that is no data by itself is
`WorkerError`, which crosses as its code, message and details.
"""

from __future__ import annotations

from typing import Any

import msgspec

from worker.errors import WorkerError, error_of, not_utf8

_WIDE_INTEGER = 1
MALFORMED = (msgspec.DecodeError, ValueError, RecursionError)
"""What decoders raise for anything but what the other process may write."""


def to_data(value: object) -> object:
    """The encoders' hook."""
    if isinstance(value, WorkerError):
        return value.code, value.message, value.details
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def with_wide_integers(data: Any) -> Any:
    """Encoded data has integers of 64 bits; wider ones, as a tool's schema may have them, cross as
    an extension type that has their digits."""
    if isinstance(data, int) and not -(1 << 63) <= data < 1 << 64:
        return msgspec.msgpack.Ext(_WIDE_INTEGER, str(data).encode())
    if isinstance(data, dict):
        return {key: with_wide_integers(value) for key, value in data.items()}
    return list(map(with_wide_integers, data)) if isinstance(data, list | tuple) else data


def wide_integer(code: int, digits: memoryview) -> int:
    """The decoders' hook for that extension type."""
    if code != _WIDE_INTEGER:
        raise ValueError(f"there is no extension type {code}")
    return int(bytes(digits))


def check_sendable(settings: msgspec.Struct) -> None:
    """Raises `ConfigError` if a path in the settings is no text, which is how it would cross."""
    try:
        msgspec.msgpack.encode(settings)
    except UnicodeEncodeError as error:
        raise not_utf8(error) from error


def from_data(kind: type, data: Any) -> WorkerError:
    """The decoders' hook."""
    assert kind is WorkerError, "the only class that is no data by itself"
    return error_of(*msgspec.convert(data, tuple[str, str, dict[str, Any]]))
