"""The last event of a stream that lost its worker, and refusals, each in the client's dialect.

A stream is never cut without a word: it ends with one error event, in the form that the worker
itself would have used. Nothing here does I/O.
"""

from __future__ import annotations

import json
import time
from typing import Any

from worker.api.http.encoding import dumps, sse
from worker.api.http.errors import (
    anthropic_error,
    dialect_of,
    error_body,
    http_status,
    openai_error,
)
from worker.errors import WorkerError

_TERMINAL = (
    b"event: end\n", b"event: error\n", b"data: [DONE]\n", b"event: message_stop\n",
    b"event: response.completed\n", b"event: response.incomplete\n", b"event: response.failed\n",
    b'data: {"error":',
)  # fmt: skip
_TERMINAL_LINES = (b'{"type":"end"', b'{"type":"error"')
KEEPALIVE = b": keep-alive\n\n"


class Tail:
    """Follows a stream's bytes, so that an error event can end it at an event boundary."""

    def __init__(self, path: str, *, is_sse: bool) -> None:
        self._path = path
        self._boundary = b"\n\n" if is_sse else b"\n"
        self._is_sse = is_sse
        self._partial = b""
        self._is_responses = dialect_of(path) == "openai" and path.endswith("/responses")
        self._first = self._last = b""

    def whole(self, chunk: bytes) -> bytes:
        """The events that this chunk completes; an incomplete event is held back."""
        data = self._partial + chunk if self._partial else chunk
        cut = data.rfind(self._boundary)
        if cut < 0:
            self._partial = data
            return b""
        cut += len(self._boundary)
        self._partial, data = data[cut:], data[:cut]
        if self._is_responses and not self._first:
            self._first = data
        self._last = data
        return data

    @property
    def has_ended(self) -> bool:
        """Whether the stream's own terminal event has passed."""
        event = self._last.rstrip(b"\n").rpartition(self._boundary)[2]
        return (event + b"\n").startswith(_TERMINAL if self._is_sse else _TERMINAL_LINES)

    def ending(self, error: WorkerError) -> bytes:
        """The terminal event that reports `error`."""
        if not self._is_sse:
            return dumps(_native(error)).encode() + b"\n"
        match dialect_of(self._path):
            case "anthropic":
                body = anthropic_error(error.message, http_status(error))
                return sse({"type": "error", "error": body})
            case "openai" if self._is_responses:
                return sse(self._failed_response(error))
            case "openai":
                body_ = openai_error(error.code, error.message, http_status(error))
                return f"data: {dumps({'error': body_})}\n\n".encode()
        return sse(_native(error))

    def _failed_response(self, error: WorkerError) -> dict[str, Any]:
        """`response.failed` with the stream's first response object and the next number."""
        begun = json_object(self._first.partition(b"\n\n")[0].rpartition(b"data: ")[2])
        last = json_object(self._last.rstrip(b"\n").rpartition(b"\n\n")[2].rpartition(b"data: ")[2])
        response = begun.get("response") or {
            "id": "", "object": "response", "created_at": int(time.time()), "output": [],
        }  # fmt: skip
        failure = openai_error(error.code, error.message, http_status(error))
        return {
            "type": "response.failed",
            "response": {**response, "status": "failed", "error": failure},
            "sequence_number": int(last.get("sequence_number", -1)) + 1,
        }


def refusal(
    error: WorkerError, path: str, correlation_id: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to a request that failed before its first byte."""
    scope = {"path": path, "state": {"correlation_id": correlation_id}}
    status = http_status(error)
    fault = (error.code, error.message, status, scope, error.details)
    headers = {"content-type": "application/json", "x-request-id": correlation_id}
    if (seconds := error.details.get("retry_after_seconds")) is not None:
        headers["retry-after"] = str(seconds)
    return status, headers, dumps(error_body(*fault, retriable=error.retriable)).encode()


def error_of_answer(status: int, body: bytes) -> WorkerError:
    """The error in a worker's answer, whichever dialect the answer is in."""
    answer = json_object(body)
    inner = answer.get("error")
    message = (inner if isinstance(inner, dict) else answer).get("message")
    kinds = [kind for kind in WorkerError.__subclasses__() if kind.status == status != 500]
    kind = kinds[0] if kinds else WorkerError
    return kind(message or f"the worker answered {status}")


def _native(error: WorkerError) -> dict[str, Any]:
    return {
        "type": "error",
        "code": error.code,
        "message": error.message,
        "retriable": error.retriable,
    }


def json_object(text: bytes) -> dict[str, Any]:
    """The text as a JSON object; empty if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
