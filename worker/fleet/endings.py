"""The last event of a stream that lost its worker, and refusals, each in the client's dialect.

A stream is never cut without a word: it ends with one error event, in the form that the worker
itself would have used. Nothing here does I/O.
"""

from __future__ import annotations

import json
from typing import Any

from worker.api.app import ROUTES
from worker.api.http.encoding import dumps
from worker.api.http.errors import http_status
from worker.api.http.operation import SSE
from worker.errors import WorkerError

KEEPALIVE = b": keep-alive\n\n"


class Tail:
    """Follows a stream's bytes, so that an error event can end it at an event boundary."""

    def __init__(self, path: str, media_type: str) -> None:
        self._boundary = b"\n\n" if media_type == SSE else b"\n"
        self._form = ROUTES.at(path).dialect.streams[media_type]
        self._partial = self._first = self._last = b""

    def whole(self, chunk: bytes) -> bytes:
        """The events that this chunk completes; an incomplete event is held back."""
        data = self._partial + chunk if self._partial else chunk
        cut = data.rfind(self._boundary)
        if cut < 0:
            self._partial = data
            return b""
        cut += len(self._boundary)
        self._partial, data = data[cut:], data[:cut]
        if not self._first:
            self._first = self._event(data.removeprefix(KEEPALIVE).partition(self._boundary)[0])
        self._last = self._event(data.removesuffix(self._boundary).rpartition(self._boundary)[2])
        return data

    def _event(self, text: bytes) -> bytes:
        return text + b"\n" if text else b""

    @property
    def has_ended(self) -> bool:
        """Whether the stream's own terminal event has passed."""
        return self._form.is_end(self._last)

    def ending(self, error: WorkerError) -> bytes:
        """The terminal event that reports `error`."""
        return self._form.failure(error, self._first, self._last)


def refusal(
    error: WorkerError, path: str, correlation_id: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to a request that failed before its first byte."""
    headers = {"content-type": "application/json", "x-request-id": correlation_id}
    if (seconds := error.details.get("retry_after_seconds")) is not None:
        headers["retry-after"] = str(seconds)
    body = ROUTES.at(path).dialect.errors.body(error, correlation_id)
    return http_status(error), headers, dumps(body).encode()


def error_of_response(status: int, body: bytes) -> WorkerError:
    """The error in a worker's answer, whichever dialect the answer is in."""
    answer = json_object(body)
    inner = answer.get("error")
    message = (inner if isinstance(inner, dict) else answer).get("message")
    kinds = [kind for kind in WorkerError.__subclasses__() if kind.status == status != 500]
    kind = kinds[0] if kinds else WorkerError
    return kind(message or f"the worker answered {status}")


def json_object(text: bytes) -> dict[str, Any]:
    """The text as a JSON object; empty if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
