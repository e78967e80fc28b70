"""What crosses between processes is data: MessagePack or JSON of typed records, checked on arrival.

The records are msgspec Structs and dataclasses. The one class that is no data by itself is
`WorkerError`, which crosses as its code, message and details.
"""

from __future__ import annotations

from typing import Any

import msgspec

from worker.errors import WorkerError, error_of

MALFORMED = (msgspec.DecodeError, ValueError, RecursionError)
"""What decoders raise for anything but what the other process may write."""


def to_data(value: object) -> object:
    """The encoders' hook."""
    if isinstance(value, WorkerError):
        return value.code, value.message, value.details
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def from_data(kind: type, data: Any) -> WorkerError:
    """The decoders' hook."""
    assert kind is WorkerError, "the only class that is no data by itself"
    return error_of(*msgspec.convert(data, tuple[str, str, dict[str, Any]]))
