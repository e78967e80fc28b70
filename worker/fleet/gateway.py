"""The fleet's HTTP side: one ASGI application in front of all workers.

Runs on the gateway's event loop. It authenticates the client, reads only the parts of a request
that routing needs (the model, the prompt's prefix, the job's id, whether a stream is wanted) and
forwards the body unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from worker.api.app import DIALECTS
from worker.api.http.app import Surface
from worker.api.http.body import SMALL_BYTES, deadline_of, names_of_fields, received
from worker.api.http.encoding import dumps, json_response
from worker.api.http.errors import FLAT
from worker.api.http.event_stream import EventStream, while_connected
from worker.api.http.faults import refusal
from worker.api.http.gate import Gate
from worker.api.http.headers import (
    ACCEPT,
    BEGAN,
    CONNECTION,
    CONTENT_LENGTH,
    CONVERSATION,
    CORRELATION_ID,
    LATE_HEAD,
    ORIGIN,
    REQUEST_ID,
    WORKER,
)
from worker.api.http.off_loop import in_background
from worker.api.http.operation import JSON, SSE, Dialect, Operation
from worker.api.http.page import pages
from worker.api.http.routes import Place, Routes
from worker.errors import (
    ConfigError,
    DuplicateJob,
    Forbidden,
    JobNotFound,
    ModelNotFound,
    NotReady,
    PathNotFound,
    QueueFull,
)
from worker.fleet.affinity import key_of
from worker.fleet.endings import json_object, refusal_of
from worker.fleet.metrics import merged
from worker.fleet.relay import RETRY_AFTER_SECONDS, Ask, Relay
from worker.fleet.settings import Fleet, settings_of
from worker.fleet.upstream import FETCH_SECONDS, Exchange, fetch
from worker.fleet.workers import Worker, WorkerTable
from worker.observability.logs import get_logger
from worker.observability.metrics import CONTENT_TYPE
from worker.setting_files import version_of

log = get_logger()

FEED_SECONDS = 15.0
"""How long the feed of changes stays open: a browser has six connections for all its tabs."""
METRICS_SECONDS = 0.5
UNSEEN_SECONDS = 0.05
"""A worker that was sent a job but does not know it yet is asked again after this time."""
MAX_HELD_BYTES = 256 * 2**20
"""The most bytes of request bodies that are held because their answers have not begun, and another
worker may need them."""
_NO_STATE: Any = None
"""The application state for operations that need none."""


async def _changes(request: Request, state: Any) -> Response:
    """An empty feed. If there are several models, the chat page opens it, and reopens it a second
    after it ends; the page fetches the models when their list is opened."""

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.sleep(FEED_SECONDS)
        yield b""

    return EventStream(nothing())


_FEED = Dialect(
    [Operation(
        "GET", "/models/sse", _changes, "Changes to the models", {}, quiet=True, asks="none"
    )],
    FLAT,
)  # fmt: skip
"""A path of llama-server's router that a single worker does not have."""


class Gateway(Surface):
    """The ASGI application; `use` sets its fleet before the first request."""

    body_setting = "max_body_bytes above the workers in the fleet's file"

    def __init__(self, table: WorkerTable) -> None:
        super().__init__()
        self._table = table
        self._asks: set[Ask] = set()
        self._jobs: dict[str, Ask] = {}
        self._by_key = Counter[str]()
        """Number of requests by the name of their key."""
        self._exposition: asyncio.Future[str] | None = None
        self._asked_at = 0.0

    def use(self, fleet: Fleet) -> None:
        """Serve this fleet from now on. Raises `ConfigError`, and changes nothing, if its token or
        keys cannot be read."""
        key_files = _key_files(fleet)
        self._read_keys(fleet)
        self._fleet, self._key_files = fleet, key_files
        self._groups: dict[str, str] = {}
        for group in fleet.workers:
            for name in group.names:
                self._groups.setdefault(name, group.name)

    def _read_keys(self, fleet: Fleet) -> None:
        """Read the clients' token and keys. Raises `ConfigError` if that fails; then the earlier
        ones stay valid."""
        token, path, first = None, fleet.token_file, fleet.workers[0]
        try:
            if path is not None and not (token := Path(path).read_text("utf-8").strip()):
                raise ValueError("the token's file is empty")
            given = {"host": fleet.host, "worker_token": token, "api_key_file": fleet.api_key_file}
            settings = settings_of(first.backend, {**first.settings, **given})
            self.gate = Gate(settings, "{} in the settings of the fleet's first workers".format)
            self._by_key.update(dict.fromkeys(self.gate.key_names, 0))
        except (OSError, ValueError, ConfigError) as error:
            raise ConfigError(f"The clients' token or keys cannot be read: {error}") from None
        self.routes = Routes([*(pages() if settings.page else []), *DIALECTS, _FEED])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (key_files := _key_files(self._fleet)) != self._key_files:
            self._key_files = key_files
            try:
                self._read_keys(self._fleet)
            except ConfigError as error:  # for example, while one is replaced
                log.warning("keys.unreadable", message=error.message)
        await super().__call__(scope, receive, send)

    def admitted(self, key: str) -> None:
        super().admitted(key)
        self._by_key[key] += 1

    async def answer(
        self, request: Request, place: Place, operation: Operation, send: Send
    ) -> object:
        if operation.asks == "none":
            return await operation.endpoint(request, _NO_STATE)
        async with received(request, self._fleet.max_body_bytes) as buffer:
            body = bytes(buffer)
            fields = await self._fields_of(request, body)
        ask = self._ask(place, operation, request, body, fields)
        del body, fields, buffer  # `ask.body` is freed when the answer begins
        self._asks.add(ask)
        try:
            n_held = sum(len(each.body) for each in self._asks)
            if n_held > max(MAX_HELD_BYTES, self._fleet.max_body_bytes):
                message = "too many requests are waiting for their answers"
                raise QueueFull(message, retry_after_seconds=RETRY_AFTER_SECONDS)
            response = await self._own_answer(ask, operation)
            if response is None:
                await self._relay(ask, request, send)
            return response
        finally:
            self._asks.discard(ask)
            request.state.code = ask.refusal

    async def _fields_of(self, request: Request, body: bytes) -> dict[str, Any]:
        """The body's fields; empty if it is not an object, or too large to parse, which the worker
        then reports."""
        if request.method != "POST":
            return {}
        if len(body) <= SMALL_BYTES:
            return json_object(body)
        return await in_background(partial(json_object, body))

    def _ask(
        self,
        place: Place,
        operation: Operation,
        request: Request,
        body: bytes,
        fields: dict[str, Any],
    ) -> Ask:
        """The request, with the fields that routing needs."""
        scope = request.scope
        # The gateway has checked Origin, since it knows the host that clients use. Headers named by
        # Connection concern only the client's connection (RFC 9110, 7.6.1).
        done = {ORIGIN.key, CORRELATION_ID.key, REQUEST_ID.key}
        for names in CONNECTION.all(scope):
            done |= {name.strip().lower().encode("latin-1") for name in names.split(",")}
        headers = [(name, value) for name, value in scope["headers"] if name not in done]
        headers.append((REQUEST_ID.key, request.state.correlation_id.encode()))
        head = {"headers": headers}
        is_late = "1" in LATE_HEAD.all(head)  # a proxy wants to wait for the first token
        counts_bytes = bool(CONVERSATION.all(head))
        in_body = [fields.get(name) for name in _model_fields(operation)]
        in_query = filter(None, request.query_params.getlist("model"))
        given = [place.parameters.get("model"), *in_body, *in_query]
        named = next((each for each in given if each is not None), None)
        job_id = fields.get("job_id") if operation.names_job else None
        return Ask(
            method=scope["method"],
            streams=operation.streams,
            target=_target(scope, place),
            headers=headers,
            body=body,
            group=self._group_of(place, named),
            names_model=isinstance(named, str),
            key=key_of(fields),
            job_id=job_id if isinstance(job_id, str) else None,
            waits_as=None
            if is_late or counts_bytes
            else _stream_of(operation, fields, ACCEPT.of(request) or ""),
            counts_bytes=counts_bytes,
            check_deadline=partial(deadline_of, request)
            if 504 in operation.failures
            else lambda: None,
            only=self._named_worker(head),
        )

    def _named_worker(self, head: Scope) -> Worker | None:
        """The worker that the request names, if any. It may be draining, since it can still have
        what is asked for, and refuses new work itself."""
        for id in WORKER.all(head):
            for worker in self._table.all_workers():
                if worker.id == id:
                    return worker
            raise PathNotFound(f"the fleet has no worker {id!r}; /ready lists those it has")
        return None

    def _group_of(self, place: Place, model: object) -> str:
        """The group that serves `model`; without a model, the first."""
        if not isinstance(model, str):
            return self._fleet.workers[0].name
        own = model if model in self._groups else place.dialect.model_name(model)
        if own not in self._groups:
            there = ", ".join(self._groups)
            raise ModelNotFound(f"the fleet has no model {model!r}; it has {there}")
        return self._groups[own]

    # --- requests that a worker answers --------------------------------------------------

    async def _relay(self, ask: Ask, request: Request, send: Send) -> None:
        job_id = ask.job_id
        if (running := self._running(job_id)) is not None:
            if running.worker is None:
                raise DuplicateJob(f"the job {job_id!r} is already running")
            ask.only = running.worker  # it knows the job, and refuses the duplicate
            job_id = None
        if job_id is not None:
            self._jobs[job_id] = ask
        relay = Relay(ask, self._table, send, partial(self.begin, request))
        relaying = asyncio.ensure_future(relay.run())
        try:
            async with while_connected(request.receive, relaying.cancel):
                await asyncio.wait({relaying})
                if not relaying.cancelled():
                    relaying.result()
        finally:
            await asyncio.wait({relaying})
            if job_id is not None and self._jobs.get(job_id) is ask:
                del self._jobs[job_id]

    def _running(self, job_id: str | None) -> Ask | None:
        """This gateway's job with that id, until its end is sent to the client."""
        running = None if job_id is None else self._jobs.get(job_id)
        return None if running is None or running.has_ended else running

    # --- requests that the gateway answers -----------------------------------------------

    async def _own_answer(self, ask: Ask, operation: Operation) -> Response | None:
        """The gateway's own answer, possibly combined from several workers'; `None` if one worker's
        answer is to be relayed."""
        if operation.asks == "refused":
            raise Forbidden("clients cannot stop a fleet; `llorch-ray down` does that")
        if ask.only is not None:
            if operation.asks == "all":
                ask.job_id = None  # the request is about a job, and is not a job itself
            return None
        if operation.asks == "named":
            what = "is required: this changes one worker, and the others would behave differently"
            raise refusal(WORKER.name, "required", what)
        if operation.probe == "metrics":
            return await self._metrics()
        if operation.probe is not None:
            return self._state(asks_for_readiness=operation.probe == "readiness")
        if operation.asks == "groups" and not ask.names_model:
            found = [self._table.choose(group.name, None, ()) for group in self._fleet.workers]
            return await self._answer_from_several([each for each in found if each], ask, operation)
        if operation.asks == "all":
            if SSE in operation.answers:
                ask.only = await self._holder(ask)
                return None
            return await self._answer_from_all(ask, operation)
        return None

    def _state(self, *, asks_for_readiness: bool) -> Response:
        """Liveness or readiness; a gateway without a healthy worker is alive, but not ready."""
        workers = self._table.workers()
        n_well = sum(worker.is_well for worker in workers)
        body: dict[str, Any] = {"status": "healthy"}
        if asks_for_readiness:
            state = "loading" if not n_well else "busy" if any(w.running for w in workers) else ""
            body = {"ready": n_well > 0, "state": state or "idle"}
        body["workers"] = [
            {
                "id": worker.id, "model": worker.group, "running": len(worker.running),
                "well": worker.is_well, **({"uri": worker.uri} if self._fleet.is_open else {}),
            }
            for worker in workers
        ]  # fmt: skip
        return json_response(body, 503 if asks_for_readiness and not n_well else 200)

    async def _metrics(self) -> Response:
        """The metrics of all workers, fetched at most twice a second, because anyone can ask."""
        now = time.monotonic()
        if self._exposition is None or now > self._asked_at + METRICS_SECONDS:
            self._asked_at = now
            self._exposition = asyncio.ensure_future(self._exposed())
        text = await asyncio.shield(self._exposition)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _exposed(self) -> str:
        answers = await _answers(
            self._table.workers(),
            lambda worker: fetch(worker.address, "GET", "/metrics", is_brief=worker.misses > 0),
        )
        texts = {
            (worker.id, worker.group): answer.content.decode(errors="replace")
            for answer, worker in answers
            if answer.status == 200
        }
        return await in_background(partial(merged, texts, dict(self._by_key)))

    async def _holder(self, ask: Ask) -> Worker | None:
        """The worker that has the stream that the request names; of several, the one where it began
        last. `None` if there is none."""
        heads = await _answers(self._table.all_workers(), partial(_forward, ask, "HEAD"))
        began = {
            worker: float(head.header(BEGAN.key) or 0)
            for head, worker in heads
            if head.status != JobNotFound.status
        }
        return max(began, key=began.__getitem__, default=None)

    async def _answer_from_all(self, ask: Ask, operation: Operation) -> Response:
        """The answer that depends on all workers, or on the one that has a job or a stream. If this
        gateway knows which worker has the job, it asks only that one."""
        running = self._running(ask.job_id)
        if running is None:
            return await self._answer_from_several(self._table.all_workers(), ask, operation)
        running.cancelled = True
        deadline = time.monotonic() + FETCH_SECONDS
        with contextlib.suppress(NotReady):
            while running in self._asks and running.worker is not None:
                answer = await self._answer_from_several([running.worker], ask, operation)
                if answer.status_code != JobNotFound.status or time.monotonic() > deadline:
                    return answer
                await asyncio.sleep(UNSEEN_SECONDS)  # it is still reading the job
        ask.refusal = None
        return json_response({"job_id": ask.job_id, "status": "cancelled"}, 202)

    async def _answer_from_several(
        self, workers: Iterable[Worker], ask: Ask, operation: Operation
    ) -> Response:
        """One answer from those of several workers: joined, or the one of a worker that has what
        was asked for."""
        method = "GET" if ask.method == "HEAD" else ask.method
        answers = await _answers(workers, partial(_forward, ask, method))
        if not answers:
            message = "the fleet has no worker that could answer"
            raise NotReady(message, retry_after_seconds=RETRY_AFTER_SECONDS)
        good = [each for each in answers if each[0].status < 400]
        bad = [each for each in answers if each[0].status != JobNotFound.status]
        answer, worker = [*good, *bad, *answers][0]
        content, ask.refusal = answer.content, refusal_of(answer.status, answer.content)
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in answer.headers
            if name != CONTENT_LENGTH.key
        }
        if operation.joined is not None and good:
            joined = operation.joined([json.loads(each.content) for each, _ in good])
            content = dumps(joined).encode()
        else:
            headers[WORKER.name] = worker.id
        return Response(content, answer.status, headers)


def _key_files(fleet: Fleet) -> list[object]:
    """The versions of the files of the clients' token and keys."""
    files = (fleet.token_file, fleet.api_key_file)
    return [version_of(file) for file in files if file is not None]


async def _answers(
    workers: Iterable[Worker], asked: Callable[[Worker], Awaitable[Exchange | None]]
) -> list[tuple[Exchange, Worker]]:
    """Ask all workers at the same time; returns the answers that arrived, with their workers."""
    several = list(workers)
    answers = await asyncio.gather(*map(asked, several))
    pairs = zip(answers, several, strict=True)
    return [(answer, worker) for answer, worker in pairs if answer is not None]


def _forward(ask: Ask, method: str, worker: Worker) -> Awaitable[Exchange | None]:
    """A worker's answer to the client's request."""
    target, headers = ask.target.decode("latin-1"), worker.headers_for(ask.headers)
    is_brief = worker.misses > 0  # the client waits for the slowest worker
    return fetch(worker.address, method, target, headers, ask.body, is_brief=is_brief)


def _model_fields(operation: Operation) -> list[str]:
    """All names of the field in the operation's body that selects the model."""
    if operation.names_job:
        return []
    names = names_of_fields(operation.body) if isinstance(operation.body, type) else {}
    return [name for name, field in names.items() if field == "model"] or ["model"]


def _stream_of(operation: Operation, fields: Mapping[str, Any], accepted: str) -> str | None:
    """The media type of the stream that a body with these fields asks for, if it asks for one: by
    its field `stream`, or its default, or in an operation without that field by `Accept`."""
    if operation.body is None:
        return None
    media_type = next(iter(operation.streams), None)
    if media_type is None or JSON not in operation.answers:
        return media_type
    chosen = getattr(operation.body, "model_fields", {}).get("stream")
    if chosen is None:
        return media_type if media_type in accepted else None
    wanted = fields.get("stream")
    return media_type if (chosen.default if wanted is None else wanted) is True else None


def _target(scope: Scope, place: Place) -> bytes:
    """The path and query for a worker, without what precedes the API: a worker may have no page."""
    path: bytes = scope["raw_path"].removeprefix(place.above.encode())
    query: bytes = scope["query_string"]
    return path + (b"?" + query if query else b"")
