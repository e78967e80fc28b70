"""Processes exchange only data: typed records as MessagePack or JSON, which are checked on arrival.

The records are msgspec Structs and dataclasses. The only other class is `WorkerError`, which is
sent as its code, message and details.
"""

from __future__ import annotations

from typing import Any

import msgspec

from worker.errors import WorkerError, error_of, not_utf8

_WIDE_INTEGER = 1
MALFORMED = (msgspec.DecodeError, ValueError, RecursionError)
"""What decoders raise for anything that the other process is not allowed to send."""


def to_data(value: object) -> object:
    """The encoders' hook for classes that msgspec does not know."""
    if isinstance(value, WorkerError):
        return value.code, value.message, value.details
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def with_wide_integers(data: Any) -> Any:
    """Replace integers of more than 64 bits, which a tool's schema can contain, with an extension
    type that has their digits: MessagePack has no wider ones."""
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
    """Raises `ConfigError` if a path in the settings is not valid UTF-8, and so cannot be sent."""
    try:
        msgspec.msgpack.encode(settings)
    except UnicodeEncodeError as error:
        raise not_utf8(error) from error


def from_data(kind: type, data: Any) -> WorkerError:
    """The decoders' hook for `WorkerError`."""
    assert kind is WorkerError, "the only class without an encoding of its own"
    return error_of(*msgspec.convert(data, tuple[str, str, dict[str, Any]]))
