"""The ASGI application: each request from its head to its log line.

It gives the request a correlation id, lets the gate check it, finds its operation, and turns every
failure into an answer in the form of the operation's dialect. It reads no body. Runs on the API
process's event loop.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from worker.api.http.errors import error_response
from worker.api.http.gate import Gate, Head, head_of
from worker.api.http.operation import Dialect
from worker.api.http.routes import Routes
from worker.api.http.state import AppState, Refusal
from worker.api.http.turnstile import Turnstile
from worker.errors import InferenceFailed, WorkerError
from worker.observability.logs import bind_correlation_id, bind_key, get_logger

_NOT_IN_AN_ID = re.compile(rb"[^A-Za-z0-9._:@/+=-]")
_NOT_IN_A_FIELD = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_MAX_ID_CHARS = 128
_MAX_IGNORED_CHARS = 2048
"""Of the names of ignored fields; clients and proxies take headers of 8 KiB."""

_MAX_REASON_CHARS = 256

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
        operation = place.operations.get(scope["method"])
        is_probe = operation is not None and operation.probe
        if not is_probe:
            await self._turnstile.enter()
        head = head_of(scope["headers"])
        correlation_id = _correlation_id(head)
        scope["app"] = self
        scope.setdefault("state", {})["correlation_id"] = correlation_id
        bind_correlation_id(correlation_id)

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                id_ = correlation_id.encode()
                added = [(b"x-correlation-id", id_), (b"x-request-id", id_)]
                if names := scope["state"].get("ignored_fields"):
                    added.append((b"x-ignored-fields", _shown(names).encode()))
                if b"origin" in head:
                    added += self._gate.cors(head)
                message["headers"] = [*message["headers"], *added]
            await send(message)

        try:
            if scope["method"] == "OPTIONS" and (allowed := self._gate.preflight(head)):
                await send({"type": "http.response.start", "status": 204, "headers": allowed})
                await send({"type": "http.response.body"})
                return
            try:
                if (key := self._gate.check(operation, scope, head)) is not None:
                    bind_key(key)
                    self.state.metrics.keys.labels(key).inc()
                if operation is None:
                    raise place.missing(scope["method"])
                scope["path_params"] = place.parameters
                request = Request(scope, receive, answer)
                response = await operation.endpoint(request, self.state)
            except WorkerError as error:
                response = error_response(error, place.dialect.errors, correlation_id)
                if operation is not None and not is_probe:
                    refusal = _refusal(path, response.status_code, error)
                    self.state.refusals.append(refusal)
            except ClientDisconnect:  # before its body was read; nobody reads this answer
                response = Response(status_code=499)
            await response(scope, receive, answer)
        except Exception:
            _log.exception("request.broken", path=path)
            if status:
                raise
            fault = InferenceFailed("an internal error; the log names it by the correlation id")
            broken = error_response(fault, place.dialect.errors, correlation_id)
            await broken(scope, receive, answer)
        finally:
            quiet = is_probe or (operation is not None and operation.quiet)
            write = _log.debug if quiet else _log.info
            write(
                "request.answered",
                method=scope["method"],
                path=path,
                status=status,
                duration_ms=round((time.monotonic() - began) * 1000, 3),
            )


def _refusal(path: str, status: int, error: WorkerError) -> Refusal:
    """Where the body is at fault, the reason names fields alone: a message may quote the body."""
    faults = error.details.get("errors")
    reason = error.message
    if faults:
        named = (f"{each['field'] or 'the body'} ({each['constraint']})" for each in faults)
        reason = ", ".join(named)[:_MAX_REASON_CHARS]
    return Refusal(time.time(), path, status, error.code, reason)


def _correlation_id(head: Head) -> str:
    given = head.get(b"x-correlation-id") or head.get(b"x-request-id") or [b""]
    clean = _NOT_IN_AN_ID.sub(b"", given[-1])[:_MAX_ID_CHARS]
    return clean.decode() if clean else uuid.uuid4().hex


def _shown(names: Sequence[str]) -> str:
    """The names of the body's ignored fields: as many as fit, and how many more."""
    shown = ""
    for index, name in enumerate(names):
        clean = _NOT_IN_A_FIELD.sub("", name[:_MAX_ID_CHARS])
        if len(shown) + len(clean) > _MAX_IGNORED_CHARS:
            return f"{shown}, +{len(names) - index} more"
        shown += ", " * bool(shown and clean) + clean
    return shown
