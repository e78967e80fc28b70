"""Relays one request to a worker. Before the first token, a failure is retried on another worker;
after it, a failure ends the stream with an error event.

Runs on the gateway's event loop. The worker is asked to hold back its status line until the first
token, so that a failure before it is an error status or a lost connection. The stream of a
conversation begins earlier, with the prompt's progress, and is not retried from there on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.types import Send

from worker.api.http.encoding import KEEPALIVES
from worker.api.http.headers import LATE_HEAD, RETRY_AFTER, UNBUFFERED, WORKER
from worker.api.http.operation import SSE, StreamForm
from worker.errors import Cancelled, EngineCrashed, NotReady, WorkerError
from worker.fleet.endings import Tail, error_of_response, refusal_of
from worker.fleet.upstream import Exchange, Headers, Lost, NotReached
from worker.fleet.workers import AVOIDED_SECONDS, Worker, WorkerTable

MAX_LOSSES = 3
"""A request that has lost this many workers is abandoned: it may be the cause."""
REPLACEMENT_SECONDS = 20.0
"""How long, from its first wait on, a request waits for a worker to appear or to accept it. It does
not wait for a full worker."""
RETRY_AFTER_SECONDS = 2
KEEPALIVE_SECONDS = 15.0
"""If a stream's first token takes longer, the client gets a status line and a sign of life."""


@dataclass(slots=True, eq=False)
class Ask:
    """A client's request: its parts, the fields that routing needs, and its progress."""

    method: str
    streams: Mapping[str, StreamForm]
    """The forms of the operation's streams, by media type."""
    target: bytes
    headers: Headers
    body: bytes
    """Empty once the answer has begun."""
    group: str
    names_model: bool
    """Whether it names a model; otherwise it goes to the first group."""
    key: str | None
    job_id: str | None
    waits_as: str | None
    """The media type of the stream whose client gets signs of life before its first token; `None`
    if its client gets nothing before the worker's answer."""
    counts_bytes: bool
    """Whether its client can resume the stream at a byte offset. It then gets exactly the worker's
    bytes, from the prompt's progress on, and no signs of life from the gateway."""
    check_deadline: Callable[[], object]
    """Raises the worker's error if the client's deadline has passed. Workers check the deadline
    themselves; the gateway checks it while it has no worker for the request."""
    only: Worker | None = None
    """The only worker that can answer this request; `None` if any can."""
    worker: Worker | None = None
    """The worker that has the request now."""
    cancelled: bool = False
    refusal: str | None = None
    """The code of the worker's error if that is forwarded instead of an answer."""
    has_ended: bool = False
    """Whether the answer's end is on its way to the client, who may then reuse the job's id."""


class Relay:
    def __init__(
        self,
        ask: Ask,
        table: WorkerTable,
        send: Send,
        begin: Callable[[int, Headers], Headers],
    ) -> None:
        """`begin` makes the response's headers from a status and the worker's headers."""
        self._ask, self._table, self._send, self._head_of = ask, table, send, begin
        self._has_begun = False
        self._tried: set[str] = set()
        self._n_losses = 0
        self._tail: Tail | None = None
        self._refused: tuple[Exchange, Worker] | None = None
        """A full or failed worker's response, which the client gets if no other worker answers."""
        self._away: tuple[Exchange, Worker] | None = None
        """The response of a worker that is draining or reloading its model."""
        self._deadline = math.inf
        """The end of all waiting, counted from the first wait."""

    async def run(self) -> None:
        """Relay the request. Raises `WorkerError` if it fails before its answer has begun."""
        try:
            while (worker := await self._next_worker()) is not None:
                self._tried.add(worker.id)
                if await self._try(worker):
                    return
            if (refused := self._refused or self._away) is None:
                message = "the fleet has no worker that could take this request"
                raise NotReady(message, retry_after_seconds=RETRY_AFTER_SECONDS)
            await self._answer(*refused)
        except WorkerError as error:
            if self._tail is None or not self._has_begun:
                raise
            ending = self._tail.ending(error)
            self._ask.has_ended = True
            await self._send({"type": "http.response.body", "body": ending})

    async def _next_worker(self) -> Worker | None:
        ask = self._ask
        if self._n_losses >= MAX_LOSSES:
            raise EngineCrashed(f"{self._n_losses} workers were lost while they had this request")
        while True:
            if ask.cancelled:
                raise Cancelled("the job was cancelled before a worker had it")
            if ask.only is not None:
                return None if self._tried else ask.only
            worker = self._table.choose(ask.group, ask.key, self._tried)
            if worker is not None or self._refused is not None:
                return worker
            # All workers are lost or away; a replacement should appear soon.
            now = asyncio.get_running_loop().time()
            self._deadline = min(self._deadline, now + REPLACEMENT_SECONDS)
            if now > self._deadline:
                return None
            ask.check_deadline()
            await asyncio.sleep(AVOIDED_SECONDS / 10)
            self._tried &= {each.id for each in self._table.workers(ask.group) if not each.is_well}

    async def _try(self, worker: Worker) -> bool:
        """Send the request to this worker; returns whether the client has its answer."""
        ask = self._ask
        ask.worker = worker
        worker.running.append(ask.key)
        late = [] if ask.counts_bytes else [(LATE_HEAD.key, b"1")]
        headers = [*worker.headers_for(ask.headers), *late]
        begun = Exchange.begin(*worker.address, ask.method, ask.target, headers, ask.body)
        try:
            async with begun as exchange:
                worker.aborts.add(exchange.abort)
                try:
                    return await self._pass_back(worker, exchange)
                finally:
                    worker.aborts.discard(exchange.abort)
        except (NotReached, Lost) as error:
            worker.avoid()
            self._n_losses += isinstance(error, Lost)
            return False
        finally:
            ask.worker = None
            worker.running.remove(ask.key)

    async def _pass_back(self, worker: Worker, exchange: Exchange) -> bool:
        """Forward the worker's answer to the client; `False` if another worker should be tried."""
        await self._head(exchange)
        media_type = exchange.header(b"content-type").decode("latin-1").partition(";")[0]
        if exchange.status == 200 and media_type in self._ask.streams:
            await self._stream(worker, exchange, media_type)
            return True
        await exchange.body()
        if exchange.status == 503 and self._ask.only is None:
            if exchange.header(RETRY_AFTER.key):  # it is full, whatever its dialect calls that
                self._refused = exchange, worker
            else:  # it is draining or reloading its model
                self._away = exchange, worker
                worker.avoid()
            return False
        if exchange.status == 500 and self._n_losses == 0 and self._ask.method == "POST":
            self._n_losses += 1
            self._refused = exchange, worker
            return False
        await self._answer(exchange, worker)
        return True

    async def _head(self, exchange: Exchange) -> None:
        """Wait for the worker's status line; the client of a stream gets signs of life."""
        if (media_type := self._ask.waits_as) is None:
            await exchange.head()
            return
        waiting = asyncio.ensure_future(exchange.head())
        try:
            while not (await asyncio.wait({waiting}, timeout=KEEPALIVE_SECONDS))[0]:
                if not self._has_begun:
                    await self._begin(200, _own_headers(media_type))
                    self._tail = self._new_tail(media_type)
                await self._chunk(KEEPALIVES[media_type])
            waiting.result()
        finally:
            waiting.cancel()

    async def _stream(self, worker: Worker, exchange: Exchange, media_type: str) -> None:
        """Forward a stream. It is also lost if the worker closes it without the last event."""
        tail = self._tail = self._new_tail(media_type)
        has_part = False  # of the worker's answer; the gateway's comments do not count
        try:
            while (chunk := await exchange.chunk()) is not None:
                if events := tail.whole(chunk):
                    self._ask.body, has_part = b"", True
                    self._ask.has_ended = tail.has_ended
                    if not self._has_begun:
                        await self._begin(200, _with_worker(exchange.headers, worker))
                    await self._chunk(events)
            if self._ask.method == "POST" and not tail.has_ended:  # a resumed one may be past it
                raise Lost("the answer ended without its last event")
        except Lost:
            if not has_part:
                raise
            worker.avoid()
            if not tail.has_ended:
                raise EngineCrashed("the worker was lost in the middle of the stream") from None
        self._ask.has_ended = True
        if not self._has_begun:  # such as one that was resumed at its end
            await self._begin(200, _with_worker(exchange.headers, worker))
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    # --- to the client -------------------------------------------------------------------

    def _new_tail(self, media_type: str) -> Tail:
        return Tail(self._ask.streams[media_type], media_type)

    async def _begin(self, status: int, headers: Headers) -> None:
        self._has_begun = True
        head = self._head_of(status, headers)
        await self._send({"type": "http.response.start", "status": status, "headers": head})

    async def _chunk(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _answer(self, answer: Exchange, worker: Worker) -> None:
        """Forward a complete answer; if a stream has already begun, it can only be an error."""
        if self._has_begun:
            raise error_of_response(answer.status, answer.content)
        self._ask.body, self._ask.has_ended = b"", True
        self._ask.refusal = refusal_of(answer.status, answer.content)
        headers = answer.headers
        if answer.content and not answer.header(b"content-length"):
            headers = [*headers, (b"content-length", b"%d" % len(answer.content))]
        await self._begin(answer.status, _with_worker(headers, worker))
        await self._send({"type": "http.response.body", "body": answer.content})


def _own_headers(media_type: str) -> Headers:
    charset = "; charset=utf-8" if media_type == SSE else ""
    headers = {"content-type": media_type + charset, **UNBUFFERED}
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _with_worker(headers: Headers, worker: Worker) -> Headers:
    return [*headers, (WORKER.key, worker.id.encode())]
