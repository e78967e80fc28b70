"""Error answers: their status, their headers, and the two common forms of their bodies.

A dialect uses one of these forms or has its own. Pure functions, any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NotRequired

from starlette.responses import Response
from typing_extensions import TypedDict

from worker.api.http.encoding import data_event, json_response
from worker.api.http.faults import Fault, fault
from worker.api.http.headers import RETRY_AFTER
from worker.api.http.operation import ErrorForm, StreamForm
from worker.errors import ContextLengthExceeded, WorkerError


class FlatError(TypedDict):
    code: str
    message: str
    retriable: bool
    correlation_id: str
    errors: NotRequired[list[Fault]]


class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class NestedError(TypedDict):
    error: ErrorObject
    correlation_id: str


def error_response(error: WorkerError, form: ErrorForm, correlation_id: str) -> Response:
    """The answer to a request that failed before its first byte."""
    headers: dict[str, str] = {}
    if (seconds := error.details.get("retry_after_seconds")) is not None:
        headers[RETRY_AFTER.name] = str(max(1, round(float(seconds))))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 405:
        headers["allow"] = ", ".join(error.details["allowed"])
    return json_response(form.body(error, correlation_id), error.status, headers)


def error_head(error: WorkerError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message, "retriable": error.retriable}


def error_object(error: WorkerError) -> dict[str, Any]:
    """The error as one object, in OpenAI's form; `param` is the first field at fault."""
    status, details = error.status, details_of(error)
    kind = {401: "authentication_error", 403: "permission_error"}.get(status)
    if kind is None:
        kind = "invalid_request_error" if 400 <= status < 499 else "server_error"
    errors = details.get("errors") or [{}]
    head = {"message": _openai_message(error), "type": kind, "param": errors[0].get("field")}
    return {**head, "code": error.code.lower(), **details}


def _openai_message(error: WorkerError) -> str:
    """The error's message. For a prompt that is too long it has OpenAI's wording, which clients
    search for to shorten their history."""
    if not isinstance(error, ContextLengthExceeded):
        return error.message
    n_tokens, most = error.details["prompt_tokens"], error.details["context_length"]
    return (
        f"This model's maximum context length is {most} tokens. However, you requested {n_tokens} "
        "tokens in the prompt alone. Please reduce its length."
    )


def nested_error(error: WorkerError, correlation_id: str) -> dict[str, Any]:
    return {"error": error_object(error), "correlation_id": correlation_id}


def nested_events(is_last: Callable[[bytes], bool]) -> StreamForm:
    """Server-sent events without names; a failure is sent as the last event."""
    return StreamForm(
        lambda event: is_last(event) or event.startswith(b'data: {"error":'),
        lambda error, first, latest: data_event({"error": error_object(error)}),
    )


FLAT = ErrorForm(
    lambda error, id: {**error_head(error), "correlation_id": id, **details_of(error)}, FlatError
)
NESTED = ErrorForm(nested_error, NestedError)
CHUNK_STREAM = nested_events(lambda event: event.startswith(b"data: [DONE]"))
"""OpenAI's streams."""


def details_of(error: WorkerError) -> Mapping[str, Any]:
    """The details with a list of `errors`; a refusal by the engine comes with a `field` instead."""
    known = dict(error.details)
    name = known.pop("field", None)
    if error.code in ("INVALID_REQUEST", "CONTEXT_LENGTH_EXCEEDED") and "errors" not in known:
        constraint = "context" if error.code == "CONTEXT_LENGTH_EXCEEDED" else "engine"
        known["errors"] = [fault(name or "", constraint, error.message)]
    return known
