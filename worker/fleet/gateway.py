"""The fleet's HTTP side: one ASGI application in front of all workers.

Runs on the gateway's event loop. It reads only those parts of a request that routing needs (the
model, the prompt's beginning, the job's id, whether a stream is wanted) and passes the body on as
it came.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.types import Receive, Scope, Send

from worker.api.app import ROUTES
from worker.api.http.encoding import dumps
from worker.api.http.gate import OriginRules, head_of
from worker.api.http.operation import JSON, SSE
from worker.errors import (
    DuplicateJob,
    Forbidden,
    JobNotFound,
    ModelNotFound,
    PayloadTooLarge,
    WorkerError,
)
from worker.fleet.affinity import key_of
from worker.fleet.endings import json_object, refusal
from worker.fleet.metrics import merged
from worker.fleet.relay import Ask, Relay, refuse
from worker.fleet.settings import Fleet
from worker.fleet.upstream import fetch
from worker.fleet.workers import WorkerTable
from worker.observability.metrics import CONTENT_TYPE
from worker.settings import Settings

_ALIVE = frozenset(("/health", "/v1/health", "/v2/health/live"))
_READY = frozenset(("/ready", "/v1/ready", "/v2/health/ready"))
_JOBS = frozenset(("/execute", "/v1/inference", "/v1/inference/stream"))
_LOOPBACK = ("127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Plain:
    """An answer that the gateway itself gives."""

    status: int
    body: bytes
    content_type: str = "application/json"


class Gateway:
    """The ASGI application."""

    def __init__(self, fleet: Fleet, table: WorkerTable) -> None:
        self._table = table
        self._jobs: dict[str, Ask] = {}
        self.use(fleet)

    def use(self, fleet: Fleet) -> None:
        """Serve this fleet from now on."""
        self._fleet = fleet
        first = fleet.workers[0]
        settings = Settings.load(first.backend, {**first.settings, "host": fleet.host})
        self._rules = OriginRules(settings)
        self._is_open = settings.worker_token is None
        self._is_local = fleet.host in ("localhost", *_LOOPBACK)
        self._groups: dict[str, str] = {}
        for group in fleet.workers:
            names = group.settings.get("served_model_name") or [group.name]
            self._groups |= dict.fromkeys(names if isinstance(names, list) else [], group.name)
            self._groups.setdefault(group.name, group.name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = str(scope["path"]).rstrip("/") or "/"
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-correlation-id") or headers.get(b"x-request-id")
        correlation_id = given.decode("latin-1") if given else uuid.uuid4().hex
        try:
            raw = [(name.lower(), value) for name, value in scope["headers"]]
            self._check_peer(scope)
            self._rules.check(scope["method"], scope["http_version"], head_of(raw))
            ask = Ask(
                scope["method"], path, _target(scope), self._checked(raw, correlation_id),
                await self._body(receive), correlation_id,
            )  # fmt: skip
            await self._answer(ask, receive, send)
        except WorkerError as error:
            await refuse(error, path, correlation_id, send)

    async def _answer(self, ask: Ask, receive: Receive, send: Send) -> None:
        own: Plain | None = None
        if ask.path in _ALIVE | _READY:
            own = self._state(ask.path)
        elif ask.path == "/metrics":
            own = await self._metrics()
        elif (field := _lists_models(ask)) is not None and len(self._fleet.workers) > 1:
            own = await self._models(ask, field)
        elif ask.path == "/cancel" and ask.method == "POST":
            own = await self._cancel(ask)
        elif ask.path == "/shutdown":
            raise Forbidden("a fleet is not stopped by its clients; `llorch-ray down` does that")
        if own is None:
            await self._relay(ask, receive, send)
            return
        start = {"type": "http.response.start", "status": own.status}
        start["headers"] = [
            (b"content-type", own.content_type.encode()),
            (b"content-length", b"%d" % len(own.body)),
            (b"x-request-id", ask.correlation_id.encode("latin-1")),
        ]
        await send(start)
        await send({"type": "http.response.body", "body": own.body})

    # --- requests that a worker answers --------------------------------------------------

    async def _relay(self, ask: Ask, receive: Receive, send: Send) -> None:
        job_id = self._route(ask)
        if job_id is not None and (running := self._jobs.get(job_id)) is not None:
            if running.worker is None:
                raise DuplicateJob(f"the job {job_id!r} is already running")
            ask.only = running.worker  # it knows the job and refuses the duplicate
            job_id = None
        if job_id is not None:
            self._jobs[job_id] = ask
        relaying = asyncio.ensure_future(Relay(ask, self._table, send).run())
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({relaying, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if relaying.done():
                relaying.result()
        finally:
            leaving.cancel()
            relaying.cancel()
            await asyncio.wait({relaying})
            if job_id is not None:
                del self._jobs[job_id]

    def _check_peer(self, scope: Scope) -> None:
        """Refuse other machines while the fleet is local.

        HAProxy listens only on the fleet's address, but Serve's own port listens on all of them.
        """
        client, server = (scope.get(name) or ("",) for name in ("client", "server"))
        if self._is_local and client[0] not in ("", server[0], *_LOOPBACK):
            raise Forbidden("this fleet is for its own machine; `host` in its file opens it")

    def _route(self, ask: Ask) -> str | None:
        """Set the request's fields that routing needs; returns the job's id if it has one."""
        # Where the body is no object, the worker reports the fault.
        body = json_object(ask.body) if ask.method == "POST" else {}
        ask.key = key_of(body)
        is_late = (b"x-llorch-late-head", b"1") in ask.headers  # a proxy wants no early head
        operation = ROUTES.at(ask.path).operations.get(ask.method)
        answers = operation.answers if operation is not None else {}
        asks = body.get("stream") is True or JSON not in answers
        ask.wants_stream = asks and SSE in answers and not is_late
        if len(self._fleet.workers) > 1:
            ask.group = self._group_of(body.get("model"), ask.path)
        job_id = body.get("job_id") if ask.path in _JOBS else None
        return job_id if isinstance(job_id, str) else None

    def _group_of(self, model: object, path: str) -> str:
        if not isinstance(model, str) or path in _JOBS:
            return self._fleet.workers[0].name
        own = model if model in self._groups else ROUTES.at(path).dialect.model_name(model)
        if own not in self._groups:
            there = ", ".join(self._groups)
            raise ModelNotFound(f"the fleet has no model {model!r}; it has {there}")
        return self._groups[own]

    async def _body(self, receive: Receive) -> bytes:
        limit, parts, size = self._fleet.max_body_bytes, [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b""
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise PayloadTooLarge(
                    f"the body has more than {limit} bytes, the most that this fleet takes",
                    limit_bytes=limit,
                )
            if not message.get("more_body", False):
                return b"".join(parts)

    def _checked(
        self, headers: list[tuple[bytes, bytes]], correlation_id: str
    ) -> list[tuple[bytes, bytes]]:
        """The headers for the worker. An Origin is dropped unless CORS allows it: it was checked
        here, where the host that it belongs to is known."""
        named = bool(self._rules.cors(head_of(headers)))
        kept = [(k, v) for k, v in headers if k != b"origin" or named]
        if not any(k in (b"x-correlation-id", b"x-request-id") for k, _ in kept):
            kept.append((b"x-request-id", correlation_id.encode("latin-1")))
        return kept

    # --- requests that the gateway answers -----------------------------------------------

    def _state(self, path: str) -> Plain:
        """Liveness or readiness; a gateway without a healthy worker is alive, but not ready."""
        workers = self._table.workers()
        n_well = sum(worker.is_well for worker in workers)
        told: dict[str, Any] = {"status": "healthy"}
        if path in _READY:
            state = "loading" if not n_well else "busy" if any(w.running for w in workers) else ""
            told = {"ready": n_well > 0, "state": state or "idle"}
        told["workers"] = [
            {
                "id": worker.id, "model": worker.group, "running": len(worker.running),
                "well": worker.is_well, **({"uri": worker.uri} if self._is_open else {}),
            }
            for worker in workers
        ]  # fmt: skip
        return Plain(503 if path in _READY and not n_well else 200, dumps(told).encode())

    async def _metrics(self) -> Plain:
        workers = self._table.workers()
        answers = await asyncio.gather(
            *(fetch(worker.address, "GET", "/metrics") for worker in workers)
        )
        texts = {
            (worker.id, worker.group): answer[1].decode(errors="replace")
            for worker, answer in zip(workers, answers, strict=True)
            if answer is not None and answer[0] == 200
        }
        return Plain(200, merged(texts).encode(), CONTENT_TYPE)

    async def _models(self, ask: Ask, field: str) -> Plain:
        """The models of all groups; one worker of each group is asked."""
        joined: dict[str, Any] = {}
        models: list[Any] = []
        for group in self._fleet.workers:
            worker = self._table.choose(group.name, None, ())
            answer = worker and await fetch(worker.address, "GET", ask.path, ask.headers)
            if answer and answer[0] != 200:
                return Plain(*answer)
            listed = json_object(answer[1]) if answer else {}
            models += listed.get(field, [])
            joined |= listed
        return Plain(200, dumps(joined | {field: models}).encode())

    async def _cancel(self, ask: Ask) -> Plain:
        """Cancel a job at its worker, or at all workers if this gateway does not know which."""
        job_id = json_object(ask.body).get("job_id")
        running = self._jobs.get(job_id) if isinstance(job_id, str) else None
        if running is not None:
            running.cancelled = True
        workers = [running.worker] if running and running.worker else self._table.workers()
        answers = await asyncio.gather(
            *(fetch(each.address, "POST", ask.path, ask.headers, ask.body) for each in workers)
        )
        known = [answer for answer in answers if answer is not None]
        for answer in known:
            if answer[0] != 404:
                return Plain(*answer)
        if running is not None:
            return Plain(202, dumps({"job_id": job_id, "status": "cancelled"}).encode())
        if known:
            return Plain(*known[0])
        status, _, body = refusal(
            JobNotFound("no worker of the fleet knows this job"), ask.path, ask.correlation_id
        )
        return Plain(status, body)


def _lists_models(ask: Ask) -> str | None:
    """The field of the answer that lists the models, if the request asks for them."""
    operation = ROUTES.at(ask.path).operations.get(ask.method)
    return None if operation is None else operation.models_in


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _target(scope: Scope) -> bytes:
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    query: bytes = scope.get("query_string", b"")
    return raw.partition(b"?")[0] + (b"?" + query if query else b"")
