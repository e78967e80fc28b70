"""The last event of a stream that lost its worker, in the client's dialect.

A stream never just breaks off: it ends with one error event, in the form that the worker would
have used. Nothing here does I/O.
"""

from __future__ import annotations

import contextlib
from typing import Any

from worker.api.http.body import BOM, parse_json
from worker.api.http.encoding import KEEPALIVE
from worker.api.http.operation import SSE, StreamForm
from worker.errors import InvalidRequest, WorkerError, error_of

_NO_DETAILS = frozenset(("message", "code", "type", "param", "retriable", "correlation_id"))
"""Fields that all errors have, and that are not details."""
_NO_EVENTS = (b"", KEEPALIVE.rstrip())
"""What can be between two boundaries and is not an event."""


class Tail:
    """Follows a stream's bytes, so that an error event can end it at an event boundary."""

    def __init__(self, form: StreamForm, media_type: str) -> None:
        self._boundary = b"\n\n" if media_type == SSE else b"\n"
        self._form = form
        self._partial = bytearray()
        self._first = self._last = b""
        """The first and the latest event, each with its last line's end; comments do not count."""

    def whole(self, chunk: bytes) -> bytes:
        """The events that `chunk` completes; an incomplete event is held back, but not the spaces
        before a line: they show that the worker lives."""
        n_seen = max(0, len(self._partial) - len(self._boundary) + 1)
        self._partial += chunk
        cut = self._partial.rfind(self._boundary, n_seen)
        if cut < 0 and not (self._boundary == b"\n" and self._partial.isspace()):
            return b""
        cut = len(self._partial) if cut < 0 else cut + len(self._boundary)
        whole = bytes(self._partial[:cut])
        del self._partial[:cut]
        parts = map(bytes.lstrip, whole.split(self._boundary))
        if events := [each for each in parts if each not in _NO_EVENTS]:
            self._first = self._first or events[0] + b"\n"
            self._last = events[-1] + b"\n"
        return whole

    @property
    def has_ended(self) -> bool:
        """Whether the stream's own terminal event has passed."""
        return self._form.is_end(self._last)

    def ending(self, error: WorkerError) -> bytes:
        """The terminal event that reports `error`."""
        return self._form.failure(error, self._first, self._last)


def error_of_response(status: int, body: bytes) -> WorkerError:
    """The error in a worker's response, by its code if the dialect has one, else by its status."""
    answer = json_object(body)
    inner = answer.get("error")
    fields = inner if isinstance(inner, dict) else answer
    message = str(fields.get("message") or f"the worker answered {status}")
    details = {name: value for name, value in fields.items() if name not in _NO_DETAILS}
    with contextlib.suppress(ValueError):
        return error_of(str(fields.get("code")).upper(), message, details)
    kinds = [kind for kind in WorkerError.__subclasses__() if kind.status == status != 500]
    return (kinds[0] if kinds else WorkerError)(message)


def refusal_of(status: int, body: bytes) -> str | None:
    """The code of a worker's error response; `None` for any other response."""
    return error_of_response(status, body).code if status >= 400 else None


def json_object(text: bytes) -> dict[str, Any]:
    """The text as a JSON object; empty if a worker would not accept it as one."""
    try:
        value = parse_json(text.removeprefix(BOM))
    except InvalidRequest:
        return {}
    return value if isinstance(value, dict) else {}
