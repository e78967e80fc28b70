"""The gate that every request passes: pure ASGI.

It adds a correlation id to logs and answer, checks origin and bearer token, reports ignored fields,
and writes one log line per request. It reads no body.
"""

from __future__ import annotations

import hmac
import re
import time
import uuid
from collections.abc import Mapping, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from worker.api.dialects.native.probes import ROUTES as PROBE_ROUTES
from worker.api.http.errors import error_response
from worker.api.http.origins import OriginRules
from worker.api.http.page import is_page_path
from worker.api.http.state import AppState
from worker.api.http.turnstile import Turnstile
from worker.errors import InferenceFailed, Unauthorized, WorkerError
from worker.observability.logs import bind_correlation_id, get_logger

_OPEN_PATHS = frozenset(route.path for route in PROBE_ROUTES if route.probe)
_QUIET_PATHS = _OPEN_PATHS | {"/info"}
_NOT_IN_AN_ID = re.compile(rb"[^A-Za-z0-9._:@/+=-]")
_NOT_IN_A_FIELD = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_MAX_ID_CHARS = 128

_log = get_logger()


class Gate:
    """Correlation ids, authorisation, the request's log line, and an answer when the code fails."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app = app
        self._turnstile = Turnstile()
        self._origins = OriginRules(state.settings)
        token = state.settings.worker_token
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0
        if len(scope["path"]) > 1:
            scope["path"] = scope["path"].rstrip("/") or "/"
        if scope["path"] not in _OPEN_PATHS:
            await self._turnstile.enter()
        raw: Sequence[tuple[bytes, bytes]] = scope["headers"]
        headers: Mapping[bytes, bytes] = dict(raw)
        correlation_id = _correlation_id(
            headers.get(b"x-correlation-id") or headers.get(b"x-request-id")
        )
        scope.setdefault("state", {})["correlation_id"] = correlation_id
        bind_correlation_id(correlation_id)
        echoed = [
            (name, correlation_id.encode()) for name in (b"x-correlation-id", b"x-request-id")
        ]

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [*echoed, *_ignored_header(scope), *self._origins.cors(raw)]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        try:
            if scope["method"] == "OPTIONS" and (allowed := self._origins.preflight(raw)):
                await send({"type": "http.response.start", "status": 204, "headers": allowed})
                await send({"type": "http.response.body"})
                return
            try:
                self._origins.check(scope["method"], scope["path"], scope["http_version"], raw)
                self._authorise(scope["path"], raw)
            except WorkerError as refusal:
                await error_response(refusal, scope)(scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        except Exception:
            _log.exception("request.broken", path=scope["path"])
            if status:
                raise
            error = InferenceFailed("an internal error; the log names it by the correlation id")
            await error_response(error, scope)(scope, receive, answer)
        finally:
            self._log_line(scope, status, began)

    def _authorise(self, path: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
        if self._token is None or path in _OPEN_PATHS or is_page_path(path):
            return
        given = [value for name, value in headers if name == b"authorization"]
        tokens = [token for value in given if (token := _bearer(value)) is not None]
        tokens = tokens or [value for name, value in headers if name == b"x-api-key"]
        if len(given) > 1 or len(tokens) != 1 or not hmac.compare_digest(tokens[0], self._token):
            raise Unauthorized("this worker needs a valid bearer token (Authorization)")

    def _log_line(self, scope: Scope, status: int, began: float) -> None:
        write = _log.debug if scope["path"] in _QUIET_PATHS else _log.info
        write(
            "request.answered",
            method=scope["method"],
            path=scope["path"],
            status=status,
            duration_ms=round((time.monotonic() - began) * 1000, 3),
        )


def _bearer(authorization: bytes) -> bytes | None:
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


def _correlation_id(given: bytes | None) -> str:
    clean = _NOT_IN_AN_ID.sub(b"", given or b"")[:_MAX_ID_CHARS]
    return clean.decode() if clean else uuid.uuid4().hex


def _ignored_header(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The header with the names of the body's ignored fields."""
    names = scope["state"].get("ignored_fields")
    if not names:
        return []
    clean = (_NOT_IN_A_FIELD.sub("", name)[:_MAX_ID_CHARS] for name in names)
    return [(b"x-ignored-fields", ", ".join(filter(None, clean)).encode())]
