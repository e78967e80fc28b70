"""Turns every failure into an answer in the dialect of the request's path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NotRequired

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope
from typing_extensions import TypedDict

from worker.api.http.encoding import json_response
from worker.api.http.faults import Fault, fault
from worker.errors import WorkerError


class NativeError(TypedDict):
    code: str
    message: str
    retriable: bool
    correlation_id: str
    errors: NotRequired[list[Fault]]


class OpenAIErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(TypedDict):
    error: OpenAIErrorObject
    correlation_id: str


class AnthropicErrorObject(TypedDict):
    type: str
    message: str


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str


_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


async def on_worker_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, WorkerError)
    return error_response(error, request.scope)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """The answer to an unknown path or method, which Starlette's router reports."""
    assert isinstance(error, HTTPException)
    code, message = {
        404: ("NOT_FOUND", "there is no such path; /openapi.json lists the ones there are"),
        405: ("METHOD_NOT_ALLOWED", "this path does not take that method"),
    }.get(error.status_code, ("INVALID_REQUEST", str(error.detail)))
    body = error_body(code, message, error.status_code, request.scope)
    return json_response(body, error.status_code, dict(error.headers or {}))


async def on_disconnect(request: Request, error: Exception) -> Response:
    """The client left before its body was read; nobody reads this answer."""
    assert isinstance(error, ClientDisconnect)
    return Response(status_code=499)


def error_response(error: WorkerError, scope: Scope) -> Response:
    """The answer to a request that failed before its first byte."""
    headers: dict[str, str] = {}
    retry_after = error.details.get("retry_after_seconds")
    if retry_after is not None:
        headers["retry-after"] = str(max(1, round(float(retry_after))))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    status = http_status(error)
    facts = (error.code, error.message, status, scope, error.details)
    return json_response(error_body(*facts, retriable=error.retriable), status, headers)


def http_status(error: WorkerError) -> int:
    return error.status if error.status >= 400 else 500


def error_body(
    code: str,
    message: str,
    status: int,
    scope: Scope,
    details: Mapping[str, Any] | None = None,
    *,
    retriable: bool = False,
) -> dict[str, Any]:
    """An error's body in the dialect of the path."""
    correlation_id = scope.get("state", {}).get("correlation_id", "")
    match dialect_of(scope["path"]):
        case "anthropic":
            refusal = anthropic_error(message, status)
            return {"type": "error", "error": refusal, "request_id": correlation_id}
        case "openai":
            error = openai_error(code, message, status, details)
            return {"error": error, "correlation_id": correlation_id}
    head = {"code": code, "message": message, "retriable": retriable}
    known = _with_errors(code, message, details or {})
    return {**head, "correlation_id": correlation_id, **known}


NATIVE_PATHS = ("/v1/inference", "/v1/loading", "/v1/ready", "/v1/health")
OPENAI_PATHS = ("/chat/completions", "/completions", "/embeddings", "/models", "/responses")
OTHER_PATHS = ("/completion", "/infill", "/rerank")
"""Paths of llama-server and others whose errors have OpenAI's form."""


def dialect_of(path: str) -> str:
    """All of /v1 has OpenAI's form, except Anthropic's messages and the worker's own paths."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    if path.startswith(("/v1/", *OPENAI_PATHS, *OTHER_PATHS)) and not path.startswith(NATIVE_PATHS):
        return "openai"
    return "native"


def anthropic_error(message: str, status: int) -> AnthropicErrorObject:
    return {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": message}


def openai_error(
    code: str, message: str, status: int, details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """OpenAI's error object: `param` is the first field at fault."""
    known = _with_errors(code, message, details or {})
    kind = _OPENAI_TYPES.get(status) or (
        "invalid_request_error" if 400 <= status < 499 else "server_error"
    )
    errors = known.get("errors") or [{}]
    head = {"message": message, "type": kind, "param": errors[0].get("field")}
    return {**head, "code": code.lower(), **known}


def _with_errors(code: str, message: str, details: Mapping[str, Any]) -> dict[str, Any]:
    """The details with a list of errors; a refusal by the engine only has its `field`."""
    known = dict(details)
    name = known.pop("field", None)
    if code in ("INVALID_REQUEST", "CONTEXT_LENGTH_EXCEEDED") and "errors" not in known:
        constraint = "context" if code == "CONTEXT_LENGTH_EXCEEDED" else "engine"
        known["errors"] = [fault(name or "", constraint, message)]
    return known
