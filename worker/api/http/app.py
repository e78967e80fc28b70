"""The ASGI application: each request from its head to its log line.

It assigns the request a correlation id, lets the gate check it, finds its operation, and turns
every failure into an error in the dialect's form. It reads no body. Runs on the API process's event
loop. A fleet's gateway is another `Surface`.
"""

from __future__ import annotations

import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from worker.api.http.body import BODY_SETTING
from worker.api.http.encoding import json_response
from worker.api.http.errors import details_of, error_response
from worker.api.http.gate import Gate
from worker.api.http.headers import (
    CORRELATION_ID,
    ECHOED_IDS,
    IGNORED_FIELDS,
    ORIGIN,
    REQUEST_ID,
    RawHeaders,
)
from worker.api.http.one_per_turn import OnePerTurn
from worker.api.http.openapi import Description
from worker.api.http.operation import Dialect, Operation
from worker.api.http.routes import Place, Routes
from worker.api.http.state import AppState, Refusal
from worker.errors import ContextLengthExceeded, InferenceFailed, WorkerError
from worker.observability.logs import bind, get_logger, unbind_all

_NOT_IN_AN_ID = re.compile(r"[^A-Za-z0-9._:@/+=-]")
_MAX_ID_CHARS = 128
_MAX_PATH_CHARS = 256
"""In logs and on the status page; a log line then fits into one write to a pipe."""
_MAX_IGNORED_CHARS = 2048
"""The most for the names of ignored fields; clients and proxies accept headers of 8 KiB."""
_MAX_REASON_CHARS = 256

_log = get_logger()


class Surface(ABC):
    """What answers HTTP requests; available to them as `request.app`."""

    routes: Routes
    gate: Gate
    prefix: str = ""
    """Common prefix of all paths."""
    body_bytes: int = 0
    """Total size of the bodies that are being read."""
    body_setting: str = BODY_SETTING
    """The setting that limits the size of one body, as the user spells it."""

    def __init__(self) -> None:
        self._arrivals = OnePerTurn()

    @abstractmethod
    async def answer(
        self, request: Request, place: Place, operation: Operation, send: Send
    ) -> object:
        """What the endpoint returns for an admitted request; `None` if the answer was sent."""

    def admitted(self, key: str) -> None:
        """Called when the gate admits a request with the key of this name."""
        bind(key=key)

    def refused(
        self, operation: Operation | None, path: str, status: int, error: WorkerError
    ) -> None:
        """Called for an error before a request is accepted. `operation` is `None` if the path and
        method have none."""
        return

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server is configured to offer nothing else"
        began = time.monotonic()
        raw = scope["raw_path"]  # here, a slash that belongs to a name is still encoded
        n_slashes = len(raw) - len(raw.rstrip(b"/"))
        path = scope["path"] = scope["path"][: len(scope["path"]) - n_slashes] or "/"
        if is_below := f"{path}/".startswith(f"{self.prefix}/"):
            path = scope["path"] = path[len(self.prefix) :] or "/"
        place = self.routes.at(path) if is_below else self.routes.nowhere(path)
        operation = place.operations.get(scope["method"])
        is_probe = operation is not None and operation.probe
        is_quiet = operation is not None and operation.quiet
        if not is_probe:
            await self._arrivals.turn()
        request = Request(scope, receive)
        ids = next(filter(None, (each.all(scope) for each in (CORRELATION_ID, REQUEST_ID))), [""])
        correlation_id = _NOT_IN_AN_ID.sub("", ids[-1])[:_MAX_ID_CHARS] or uuid.uuid4().hex
        scope["app"] = self
        scope.setdefault("state", {}).update(correlation_id=correlation_id, status=0, code=None)
        unbind_all()
        bind(correlation_id=correlation_id)
        try:
            if scope["method"] == "OPTIONS" and (allowed := self.gate.preflight(scope)):
                request.state.status = 204
                await send({"type": "http.response.start", "status": 204, "headers": allowed})
                await send({"type": "http.response.body"})
                return
            response = await self._response(request, place, operation, send)
            if response is not None:
                response.raw_headers = self.begin(
                    request, response.status_code, response.raw_headers
                )
                await response(scope, receive, send)
        except Exception:
            _log.exception("request.broken", path=path[:_MAX_PATH_CHARS])
            if request.state.status:
                raise
            fault = InferenceFailed("an internal error; the log names it by the correlation id")
            request.state.code = fault.code
            broken = error_response(fault, place.dialect.errors, correlation_id)
            broken.raw_headers = self.begin(request, broken.status_code, broken.raw_headers)
            await broken(scope, receive, send)
        finally:
            write = _log.debug if is_probe or is_quiet else _log.info
            write(
                "request.answered",
                method=scope["method"],
                path=path[:_MAX_PATH_CHARS],
                status=request.state.status,
                code=request.state.code,
                duration_ms=round((time.monotonic() - began) * 1000, 3),
            )

    def begin(self, request: Request, status: int, headers: RawHeaders) -> RawHeaders:
        """Record the status, and add the headers of any answer: ids, ignored fields, CORS."""
        request.state.status = status
        # An answer that a gateway forwards already has its worker's ids.
        there = {name for name, _ in headers}
        id = request.state.correlation_id.encode()
        added = [(each.key, id) for each in ECHOED_IDS if each.key not in there]
        if names := request.scope["state"].get("ignored_fields"):
            added.append((IGNORED_FIELDS.key, _shown(names).encode()))
        if ORIGIN.all(request.scope):
            added += self.gate.cors(request.scope)
        return [*headers, *added]

    async def _response(
        self, request: Request, place: Place, operation: Operation | None, send: Send
    ) -> Response | None:
        """The answer, which may be an error; `None` if it has been sent."""
        scope = request.scope
        try:
            if (key := self.gate.check(operation, scope)) is not None:
                self.admitted(key)
            if operation is None:
                raise place.missing(self.prefix)
            scope["path_params"] = place.parameters
            found = await self.answer(request, place, operation, send)
            if found is None or isinstance(found, Response):
                return found
            return json_response(found, operation.status)
        except WorkerError as error:
            request.state.code = error.code
            response = error_response(error, place.dialect.errors, request.state.correlation_id)
            # A 404 may be the answer to whether something exists; a gateway asks all workers that.
            asks = scope["method"] == "HEAD" or (operation is not None and operation.asks == "all")
            is_answer = asks and error.status == 404
            if not (is_answer or getattr(request.state, "is_accepted", False)):
                path = scope["path"][:_MAX_PATH_CHARS]
                self.refused(operation, path, response.status_code, error)
            # A job keeps its error, whose traceback keeps the job and the body: a cycle that would
            # live until the next full garbage collection, which is rare.
            error.__traceback__ = None
            return response
        except ClientDisconnect:  # nobody reads this answer
            return Response(status_code=499)


class Application(Surface):
    def __init__(
        self, state: AppState, dialects: Sequence[Dialect], beside: Sequence[Dialect] = ()
    ) -> None:
        """`beside` is served too, with precedence over `dialects`, but not described as part of the
        API."""
        super().__init__()
        self.state = state
        self.routes = Routes([*beside, *dialects])
        self.description = Description(
            [
                replace(each, operations=[o for o in each.operations if self.routes.serves(o)])
                for each in dialects
            ]
        )
        self.gate, self.prefix = Gate(state.settings), state.settings.api_prefix
        for name in self.gate.key_names:
            state.metrics.keys.labels(name)

    async def answer(
        self, request: Request, place: Place, operation: Operation, send: Send
    ) -> object:
        return await operation.endpoint(request, self.state)

    def admitted(self, key: str) -> None:
        super().admitted(key)
        self.state.metrics.keys.labels(key).inc()

    def refused(
        self, operation: Operation | None, path: str, status: int, error: WorkerError
    ) -> None:
        """Count the refusal, and list it on the status page unless a probe or a page asked.

        If the body is at fault, the reason only names fields, because a message may quote the body.
        """
        self.state.metrics.rejected.labels(error.code).inc()
        if operation is None or operation.probe or operation.quiet:
            return
        reason = error.message
        is_counted = isinstance(error, ContextLengthExceeded)  # its message quotes only numbers
        if not is_counted and (faults := details_of(error).get("errors")):
            named = (f"{each['field']} ({each['constraint']})" for each in faults)
            reason = ", ".join(named)[:_MAX_REASON_CHARS]
        self.state.refusals.append(Refusal(time.time(), path, status, error.code, reason))


def _shown(names: Sequence[str]) -> str:
    """The names of ignored fields, percent-encoded: as many as fit, then the number of the rest."""
    shown = ""
    for index, name in enumerate(names):
        clean = quote(name[:_MAX_ID_CHARS], safe="[]$", errors="replace")
        if len(shown) + len(clean) > _MAX_IGNORED_CHARS:
            return f"{shown}, +{len(names) - index} more"
        shown += ", " * bool(shown and clean) + clean
    return shown
