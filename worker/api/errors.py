"""Every failure as an answer: exceptions, and the faults of a bad request, in each dialect's form.

The only place that knows pydantic's errors. A fault repeats numbers and booleans of a body and
never its texts. Pure functions, on the API process's event loop.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NotRequired

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope
from typing_extensions import TypedDict

from worker.api.encoding import json_response
from worker.errors import InvalidRequest, WorkerError


class Fault(TypedDict):
    """One entry of a bad request's `errors`."""

    field: str
    constraint: str
    message: str
    value: NotRequired[float | bool]


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


MAX_FAULTS = 32
_NAMED_CHARS = 64
"""Of an unknown field's name, repeated in a fault."""

_CONSTRAINTS = {
    "missing": "required",
    "extra_forbidden": "unknown",
    "greater_than_equal": "minimum",
    "less_than_equal": "maximum",
    "string_too_short": "minLength",
    "string_too_long": "maxLength",
    "too_short": "minItems",
    "too_long": "maxItems",
    "literal_error": "enum",
}
"""pydantic's error types as JSON Schema's keywords; every other one is of the value's type."""
_JSON_TYPES = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}


# --- faults ------------------------------------------------------------------------------


def fault(path: str, constraint: str, message: str, value: object = None) -> Fault:
    entry = Fault(field=path or "body", constraint=constraint, message=message)
    if isinstance(value, bool) or (isinstance(value, int | float) and math.isfinite(value)):
        entry["value"] = value
    return entry


def invalid(faults: Iterable[Fault]) -> InvalidRequest:
    """The refusal for `faults`; those beyond the first 32 are left out."""
    listed = list(faults)[:MAX_FAULTS]
    return InvalidRequest("; ".join(f["message"] for f in listed), errors=listed)


def unknown_fields(names: Iterable[str], model: type[BaseModel]) -> InvalidRequest:
    return invalid(_unknown(name, model.model_fields) for name in names)


def faults_of(error: ValidationError, model: type[BaseModel]) -> list[Fault]:
    """pydantic's errors in the contract's form, each with what its field takes."""
    schema = model.model_json_schema()
    entries = [e for e in error.errors(include_url=False) if not _follows(e)]
    return [_fault_of(entry, schema, model) for entry in entries[:MAX_FAULTS]]


def _follows(entry: ErrorDetails) -> bool:
    """An array that is called too short only because an item of it was refused."""
    return entry["type"] == "too_short" and len(entry["input"]) >= entry["ctx"]["min_length"]


def _fault_of(entry: ErrorDetails, schema: Mapping[str, Any], model: type[BaseModel]) -> Fault:
    path = path_of(entry["loc"])
    kind, given = entry["type"], entry["input"]
    if kind == "extra_forbidden":
        return _unknown(path, model.model_fields)
    if kind.startswith("body."):  # raised by a validator of ours, in our words
        return fault(path, kind.removeprefix("body."), f"{path} {entry['msg']}", given)
    expected = expectation(_schemas_at(entry["loc"], schema), given)
    constraint = _CONSTRAINTS.get(kind, "type")
    if constraint == "required":
        return fault(path, constraint, f"{path} is required: {expected}")
    message = f"{path or 'the body'} must be {expected}"
    if constraint.endswith(("Length", "Items")):
        unit = "character" if constraint.endswith("Length") else "item"
        n_given = len(given)
        message += f"; it has {n_given} {unit}{'' if n_given == 1 else 's'}"
    return fault(path, constraint, message, given)


def _unknown(path: str, known: Iterable[str]) -> Fault:
    path = path[:_NAMED_CHARS]
    close = difflib.get_close_matches(path.rsplit(".", 1)[-1], list(known), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return fault(path, "unknown", f"{path} is not a field here{hint}")


def path_of(loc: Iterable[int | str]) -> str:
    """`messages[0].content`; names of union branches, which begin with `~`, are left out."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("~"):
            path += f".{step}" if path else step
    return path


def _schemas_at(loc: Iterable[int | str], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts of a JSON schema that may describe the value at `loc`."""
    found = _branches(root, root)
    for step in loc:
        if isinstance(step, int):
            found = [b for here in found if "items" in here for b in _branches(here["items"], root)]
        elif not step.startswith("~"):
            below = (
                here.get("properties", {}).get(step, here.get("additionalProperties"))
                for here in found
            )
            found = [
                b for part in below if isinstance(part, Mapping) for b in _branches(part, root)
            ]
    return found


def _branches(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A schema's alternatives with their references followed; itself where it has none."""
    if "$ref" in schema:
        return _branches(root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], root)
    parts = schema.get("anyOf") or schema.get("oneOf")
    return [b for part in parts for b in _branches(part, root)] if parts else [schema]


# --- sentences ---------------------------------------------------------------------------


def expectation(schemas: Iterable[Mapping[str, Any]], given: object) -> str:
    """What a field takes, in words; of several forms the one that was meant, where it shows."""
    forms = [schema for schema in schemas if schema.get("type") != "null"]
    meant = [form for form in forms if form.get("type") == _JSON_TYPES.get(type(given))]
    return " or ".join(dict.fromkeys(map(_noun, meant or forms))) or "any JSON value"


def _noun(schema: Mapping[str, Any]) -> str:
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    match schema.get("type"):
        case "boolean":
            return "true or false"
        case "string":
            return "a string" + _size(schema, "Length", "characters")
        case "array":
            return "an array" + _size(schema, "Items", "items")
        case "object":
            return "an object"
        case "number":
            return "a number" + _range(schema)
        case "integer":
            return "an integer" + _range(schema)
        case _:
            return "any JSON value"


def _size(schema: Mapping[str, Any], suffix: str, unit: str) -> str:
    low, high = schema.get(f"min{suffix}"), schema.get(f"max{suffix}")
    if low is not None and high is not None:
        return f" of {low} to {high} {unit}"
    if high is not None:
        return f" of at most {high} {unit}"
    return f" of at least {low} {unit}" if low is not None else ""


def _range(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" from {_plain(low)} to {_plain(high)}"
    if high is not None:
        return f" of at most {_plain(high)}"
    return f" of at least {_plain(low)}" if low is not None else ""


def _plain(bound: float) -> str:
    return str(int(bound)) if float(bound).is_integer() else str(bound)


# --- answers -----------------------------------------------------------------------------

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
    """A path or a method that is not there, as Starlette's router reports it."""
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
    """The answer for a request that failed before its first byte."""
    headers: dict[str, str] = {}
    retry_after = error.details.get("retry_after_seconds")
    if retry_after is not None:
        headers["retry-after"] = str(max(1, round(float(retry_after))))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    status = http_status(error)
    told = (error.code, error.message, status, scope, error.details)
    return json_response(error_body(*told, retriable=error.retriable), status, headers)


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
    """An error in the form of the dialect that the path belongs to."""
    details = _with_errors(code, message, details or {})
    correlation_id = scope.get("state", {}).get("correlation_id", "")
    match dialect_of(scope["path"]):
        case "anthropic":
            refusal = anthropic_error(message, status)
            return {"type": "error", "error": refusal, "request_id": correlation_id}
        case "openai":
            error = openai_error(code, message, status, details)
            return {"error": error, "correlation_id": correlation_id}
    head = {"code": code, "message": message, "retriable": retriable}
    return {**head, "correlation_id": correlation_id, **details}


NATIVE_PATHS = ("/v1/inference", "/v1/loading", "/v1/ready", "/v1/health")
OPENAI_PATHS = ("/chat/completions", "/completions", "/embeddings", "/models", "/responses")


def dialect_of(path: str) -> str:
    """Whose error form a path speaks: everything under /v1 that is not the worker's own is
    OpenAI's, but for Anthropic's messages."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    if path.startswith(("/v1/", *OPENAI_PATHS, "/rerank")) and not path.startswith(NATIVE_PATHS):
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
    """What the engine refused names one `field`; a bad request always has a list of errors."""
    known = dict(details)
    name = known.pop("field", None)
    if code in ("INVALID_REQUEST", "CONTEXT_LENGTH_EXCEEDED") and "errors" not in known:
        constraint = "context" if code == "CONTEXT_LENGTH_EXCEEDED" else "engine"
        known["errors"] = [fault(name or "", constraint, message)]
    return known
