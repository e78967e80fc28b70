"""The ASGI application: each request from its head to its log line.

It gives the request a correlation id, lets the gate check it, finds its operation, and turns every
failure into an answer in the form of the operation's dialect. It reads no body. Runs on the API
process's event loop.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from worker.api.http.errors import error_response
from worker.api.http.gate import Gate
from worker.api.http.operation import Dialect
from worker.api.http.routes import Place, Routes
from worker.api.http.state import AppState
from worker.api.http.turnstile import Turnstile
from worker.errors import InferenceFailed, WorkerError
from worker.observability.logs import bind_correlation_id, get_logger

_NOT_IN_AN_ID = re.compile(rb"[^A-Za-z0-9._:@/+=-]")
_NOT_IN_A_FIELD = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_MAX_ID_CHARS = 128
_MAX_IGNORED_CHARS = 2048
"""Of the names of ignored fields; clients and proxies take headers of 8 KiB."""

_log = get_logger()


class Application:
    """Requests have it as `request.app`."""

    def __init__(
        self, state: AppState, dialects: Sequence[Dialect], beside: Sequence[Dialect] = ()
    ) -> None:
        """`beside` has what is served too, and before the dialects, but is no part of the API."""
        self.state = state
        self._routes = Routes([*beside, *dialects])
        self.dialects = [
            replace(each, operations=[o for o in each.operations if self._routes.serves(o)])
            for each in dialects
        ]
        self._gate = Gate(state.settings)
        self._turnstile = Turnstile()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server is told to offer nothing else"
        began, status = time.monotonic(), 0
        path = scope["path"] = scope["path"].rstrip("/") or "/"
        place = self._routes.at(path)
        if not place.is_probe:
            await self._turnstile.enter()
        headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        correlation_id = _correlation_id(dict(headers))
        scope["app"] = self
        scope.setdefault("state", {})["correlation_id"] = correlation_id
        bind_correlation_id(correlation_id)

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                id_ = correlation_id.encode()
                message["headers"] = [
                    *message["headers"],
                    (b"x-correlation-id", id_),
                    (b"x-request-id", id_),
                    *_ignored_header(scope),
                    *self._gate.cors(headers),
                ]
            await send(message)

        try:
            if scope["method"] == "OPTIONS" and (allowed := self._gate.preflight(headers)):
                await send({"type": "http.response.start", "status": 204, "headers": allowed})
                await send({"type": "http.response.body"})
                return
            response = await self._respond(place, scope, receive, answer)
            await response(scope, receive, answer)
        except Exception:
            _log.exception("request.broken", path=path)
            if status:
                raise
            error = InferenceFailed("an internal error; the log names it by the correlation id")
            broken = error_response(error, place.dialect.errors, correlation_id)
            await broken(scope, receive, answer)
        finally:
            write = _log.debug if place.is_quiet else _log.info
            write(
                "request.answered",
                method=scope["method"],
                path=path,
                status=status,
                duration_ms=round((time.monotonic() - began) * 1000, 3),
            )

    async def _respond(self, place: Place, scope: Scope, receive: Receive, send: Send) -> Response:
        try:
            self._gate.check(place, scope)
            operation = place.operation(scope["method"])
            scope["path_params"] = place.parameters
            return await operation.endpoint(Request(scope, receive, send))
        except WorkerError as error:
            correlation_id = scope["state"]["correlation_id"]
            return error_response(error, place.dialect.errors, correlation_id)
        except ClientDisconnect:  # before its body was read; nobody reads this answer
            return Response(status_code=499)


def _correlation_id(headers: Mapping[bytes, bytes]) -> str:
    given = headers.get(b"x-correlation-id") or headers.get(b"x-request-id") or b""
    clean = _NOT_IN_AN_ID.sub(b"", given)[:_MAX_ID_CHARS]
    return clean.decode() if clean else uuid.uuid4().hex


def _ignored_header(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The header with the names of the body's ignored fields: as many as fit, and how many more."""
    names = scope["state"].get("ignored_fields")
    if not names:
        return []
    shown = ""
    for index, name in enumerate(names):
        clean = _NOT_IN_A_FIELD.sub("", name[:_MAX_ID_CHARS])
        if len(shown) + len(clean) > _MAX_IGNORED_CHARS:
            shown += f", +{len(names) - index} more"
            break
        shown += ", " * bool(shown and clean) + clean
    return [(b"x-ignored-fields", shown.encode())]
