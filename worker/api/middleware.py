"""The gate that every request passes, and the one place where an error becomes an answer.

Pure ASGI, on the API process's event loop: a correlation id for logs and answer, the bearer
token, one log line per request. Nothing here reads a body.
"""

from __future__ import annotations

import hmac
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from worker.api.fields import fault
from worker.api.responses import json_response
from worker.api.state import AppState
from worker.api.turnstile import Turnstile
from worker.errors import InferenceFailed, Unauthorized, WorkerError
from worker.observability.logs import bind_correlation_id, get_logger

OPEN_PATHS = frozenset(("/health", "/ready", "/v1/ready", "/metrics"))
OPENAI_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models")
_QUIET_PATHS = frozenset((*OPEN_PATHS, "/info"))
_NOT_IN_AN_ID = re.compile(rb"[^A-Za-z0-9._:@/+=-]")
_MAX_ID_CHARS = 128

_log = get_logger()


class Gate:
    """Correlation, authorisation, the request's log line, and a shield against our own bugs."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app = app
        self._turnstile = Turnstile()
        token = state.settings.worker_token
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0
        if scope["path"] not in OPEN_PATHS:
            await self._turnstile.enter()
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        correlation_id = _correlation_id(headers.get(b"x-correlation-id"))
        scope.setdefault("state", {})["correlation_id"] = correlation_id
        bind_correlation_id(correlation_id)
        echoed = (b"x-correlation-id", correlation_id.encode())

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], echoed]
            await send(message)

        try:
            if self._admits(scope["path"], headers.get(b"authorization", b"")):
                await self._app(scope, receive, answer)
            else:
                refusal = Unauthorized("this worker needs a valid bearer token (Authorization)")
                await error_response(refusal, scope)(scope, receive, answer)
        except Exception:
            _log.exception("request.broken", path=scope["path"])
            if status:
                raise
            error = InferenceFailed("an internal error; the log names it by the correlation id")
            await error_response(error, scope)(scope, receive, answer)
        finally:
            self._log_line(scope, status, began)

    def _admits(self, path: str, authorization: bytes) -> bool:
        if self._token is None or path in OPEN_PATHS:
            return True
        scheme, _, given = authorization.partition(b" ")
        return hmac.compare_digest(given.strip(), self._token) and scheme.lower() == b"bearer"

    def _log_line(self, scope: Scope, status: int, began: float) -> None:
        write = _log.debug if scope["path"] in _QUIET_PATHS else _log.info
        write(
            "request.answered",
            method=scope["method"],
            path=scope["path"],
            status=status,
            duration_ms=round((time.monotonic() - began) * 1000, 3),
        )


def _correlation_id(given: bytes | None) -> str:
    clean = _NOT_IN_AN_ID.sub(b"", given or b"")[:_MAX_ID_CHARS]
    return clean.decode() if clean else uuid.uuid4().hex


# --- errors ------------------------------------------------------------------------------


async def on_worker_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, WorkerError)
    return error_response(error, request.scope)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Paths and methods that are not there: Starlette's router speaks our shape."""
    assert isinstance(error, HTTPException)
    code = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED"}.get(error.status_code, "INVALID_REQUEST")
    messages = {
        404: "there is no such path; /openapi.json lists the ones there are",
        405: "this path does not take that method",
    }
    message = messages.get(error.status_code, str(error.detail))
    body = error_body(code, message, False, request.scope, {})
    headers = dict(error.headers) if error.headers else None
    return json_response(body, error.status_code, headers)


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
    status = error.status if error.status >= 400 else 500
    body = error_body(error.code, error.message, error.retriable, scope, error.details)
    return json_response(body, status, headers)


def error_body(
    code: str, message: str, retriable: bool, scope: Scope, details: Mapping[str, Any]
) -> dict[str, Any]:
    """`{"code","message","retriable","correlation_id"}`, or OpenAI's shape on OpenAI's paths."""
    details = _with_errors(code, message, details)
    correlation_id = scope.get("state", {}).get("correlation_id", "")
    if scope["path"].startswith(OPENAI_PATHS):
        return {
            "error": openai_error(code, message, details),
            "correlation_id": correlation_id,
        }
    return {
        "code": code,
        "message": message,
        "retriable": retriable,
        "correlation_id": correlation_id,
        **details,
    }


def _with_errors(code: str, message: str, details: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine refused names one `field`; a bad request always has a list of errors."""
    known = dict(details)
    name = known.pop("field", None)
    if code in ("INVALID_REQUEST", "CONTEXT_LENGTH_EXCEEDED") and "errors" not in known:
        constraint = "context" if code == "CONTEXT_LENGTH_EXCEEDED" else "engine"
        known["errors"] = [fault(name or "", constraint, message)]
    return known


def openai_error(code: str, message: str, details: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's error object: `param` is the first field at fault."""
    kinds = {
        "UNAUTHORIZED": "authentication_error",
        "INVALID_REQUEST": "invalid_request_error",
        "CONTEXT_LENGTH_EXCEEDED": "invalid_request_error",
        "PAYLOAD_TOO_LARGE": "invalid_request_error",
        "NOT_FOUND": "invalid_request_error",
        "METHOD_NOT_ALLOWED": "invalid_request_error",
        "MODEL_NOT_FOUND": "invalid_request_error",
    }
    known = _with_errors(code, message, details)
    errors = known.get("errors") or [{}]
    return {
        "message": message,
        "type": kinds.get(code, "server_error"),
        "param": errors[0].get("field"),
        "code": code.lower(),
        **known,
    }
