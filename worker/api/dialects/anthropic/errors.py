"""Anthropic's form of a failure: an answer, or the last event of a stream."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

from worker.api.http.encoding import sse
from worker.api.http.errors import http_status
from worker.api.http.operation import ErrorForm, StreamForm
from worker.errors import ContextLengthExceeded, WorkerError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class AnthropicErrorObject(TypedDict):
    type: str
    message: str


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str


def _error(error: WorkerError) -> dict[str, Any]:
    kind, message = _TYPES.get(http_status(error), "api_error"), error.message
    if isinstance(error, ContextLengthExceeded):  # in the words that Anthropic's clients look for
        n_tokens, most = error.details["prompt_tokens"], error.details["context_length"]
        message = f"prompt is too long: {n_tokens} tokens > {most} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


ERRORS = ErrorForm(
    lambda error, request_id: _error(error) | {"request_id": request_id}, AnthropicError
)
STREAM = StreamForm(
    lambda event: event.startswith((b"event: message_stop\n", b"event: error\n")),
    lambda error, first, last: sse(_error(error)),
)
