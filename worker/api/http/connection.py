"""One client's connection: uvicorn's protocol with limits on what a client can hold open.

A connection is idle, receives a request's head or its body, or waits for the answer. Except while
it waits for an answer, the client owes data and must send it in time (`SECONDS`). The data of one
read is parsed over several turns of the event loop, because it may hold thousands of requests or
chunks. The size of a head is limited, and so is a body's framing (chunk headers and trailers).
Unread answers are bounded in time and in bytes. The number of connections is bounded too: when
there is one too many, the client that has owed data for longest is cut off; if only the new one
owes any, the one that has left its answer unread for longest.

A client takes whatever it reads for the answer to its oldest request. So a refusal waits until the
earlier requests are answered, and nothing is written while no request is open.

Closing a socket with unread input resets the connection, and the client loses the part of its
answer that it has not read yet. So a client that may still be sending gets its answer and an
end-of-file first. Its input is discarded for a while, and then the connection is closed.
"""

from __future__ import annotations

import asyncio
import functools
import resource
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import httptools
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from worker.observability.logs import get_logger
from worker.observability.metrics import Cut
from worker.settings import OTHER_FILES

MAX_HEAD_BYTES = 64 * 1024
"""The most bytes in a request line and its headers."""
Phase = Literal["idle", "head", "body", "answer", "end"]
SECONDS: Mapping[Phase, float] = {"idle": 20.0, "head": 20.0, "body": 20.0}
"""Time limits: until the first request begins, for a whole head, and for each pause in a body.
Between requests, uvicorn's `timeout_keep_alive` applies."""
BODY_SECONDS = 120.0
"""The most time for a whole body."""
HELD_SECONDS = 1.0
"""A check that runs later than due by more than this shows that the process itself was stalled. The
client then gets this much more time, so that data that has already arrived is read first."""
HALF_CLOSED_SECONDS = 1.0
"""A client that closes its side after its request cannot be told from one that has left. Its
connection is aborted once nothing was written for this long and nothing waits to be read, so that
nothing more is computed for it."""
LINGER_SECONDS = 2.0
"""How long a client may go on sending after its last answer."""
LINGER_BYTES = 48 * 2**20
"""The most bytes that are read and discarded meanwhile, at a cost of some 20 ms."""
FRAMING_PER_BYTE = 8
"""The most bytes of framing per byte of a body. A one-byte chunk has five."""
PARSED_AT_ONCE = 8 * 1024
"""The most bytes parsed in one turn of the event loop, which takes at most some 5 ms."""
MAX_CONNECTIONS = 2048
MAX_UNREAD_BYTES = 256 * 2**20
"""The most bytes, over all connections, of answers that their clients have not read yet."""


def _refusal(status: str, text: str) -> bytes:
    head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    return f"{head}content-length: {len(text)}\r\n\r\n{text}".encode()


_REFUSALS: Mapping[Cut, bytes] = {
    "no_http": _refusal("400 Bad Request", "This is not an HTTP/1.1 request."),
    "large_head": _refusal(
        "431 Request Header Fields Too Large",
        f"The request's head, or its body's framing, exceeds {MAX_HEAD_BYTES} bytes.",
    ),
    "unknown_coding": _refusal(
        "501 Not Implemented", "The only supported transfer coding is chunked."
    ),
    "slow_request": _refusal(
        "408 Request Timeout", "The rest of the request did not arrive in time."
    ),
}

_log = get_logger()
_owing: OrderedDict[WorkerProtocol, None] = OrderedDict()
"""Connections whose client owes data, in the order in which they began to."""
_unread: OrderedDict[WorkerProtocol, None] = OrderedDict()
"""Connections whose client reads more slowly than its answer is written."""


def _lenient(parser: Any) -> Any:
    """Make `parser` read on after `Connection: close`, which uvicorn itself respects. Otherwise
    that header in a trailer would make the parser swallow the next request."""
    parser.set_dangerous_leniencies(lenient_data_after_close=True, lenient_keep_alive=True)
    return parser


class _Flow(FlowControl):
    """Resumes reading only when uvicorn wants more and everything read so far is parsed."""

    _is_parsing = False
    was_paused = False
    """Whether reading was paused since the last read, so that unread data may have arrived."""

    def pause_reading(self) -> None:
        self.was_paused = True
        super().pause_reading()

    def begin_parsing(self) -> None:
        self._is_parsing = True
        self._transport.pause_reading()

    def end_parsing(self) -> None:
        self._is_parsing = False
        if not self.read_paused:
            self._transport.resume_reading()

    def resume_reading(self) -> None:
        if self._is_parsing:
            self.read_paused = False
        else:
            super().resume_reading()


class _Transport:
    """The transport as uvicorn sees it: closing it, at an answer's end, only calls the protocol's
    `_end`, which decides when to close the socket."""

    n_written = 0
    """Bytes written since `count_written` was called."""
    is_ending = False

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        self._transport, self._end = transport, end
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def count_written(self) -> None:
        """Start counting bytes in `n_written`."""

        def write(data: bytes | bytearray | memoryview) -> None:
            self.n_written += len(data)
            self._transport.write(data)

        self.write = write

    def is_closing(self) -> bool:
        return self.is_ending or self._transport.is_closing()

    def close(self) -> None:
        if not self.is_closing():
            self.is_ending = True
            self._end()

    def close_now(self) -> None:
        """Close as soon as the written data has been sent."""
        self.is_ending = True
        self._transport.close()

    def forget(self) -> None:
        """Break the reference cycle with the protocol, so that no garbage collection is needed."""
        self._end, self.write = lambda: None, self._transport.write


class WorkerProtocol(HttpToolsProtocol):
    """uvicorn's protocol within bounds."""

    _due: float | None = None
    """When the client must have sent the data that it owes, on the loop's clock."""
    _timer: asyncio.TimerHandle | None = None
    """Calls `_check_due` at `_due` or earlier: it is reused, so that a request needs no timer of
    its own."""
    _unread_timer: asyncio.TimerHandle | None = None
    _phase: Phase = "idle"
    _body_due = 0.0
    """When the whole body must have arrived."""
    _n_overhead_bytes = 0
    """Size of the current head, or of a body's framing less what its data permits."""
    _has_begun = False
    """Whether a part of the next request's head has arrived."""
    _last_word: bytes | None = None
    """If set, no further request is read. It is written, and the connection closed, as soon as the
    requests already read are answered."""
    _has_closed_its_side = False
    _n_seen = 0
    """Bytes written to a half-closed client as of its last check."""
    _n_discarded = 0

    def __init__(
        self,
        *args: Any,
        patience_seconds: float,
        on_cut: Callable[[Cut], None],
        most_connections: int,
        **kwargs: Any,
    ) -> None:
        """`patience_seconds` is how long a client may leave an answer unread; `on_cut` is called
        for each client that is cut off."""
        super().__init__(*args, **kwargs)
        _lenient(self.parser)
        self._most_connections = most_connections
        self._unparsed = bytearray()
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._patience_seconds, self._on_cut = patience_seconds, on_cut

    def connection_accepted(self, transport: asyncio.Transport) -> None:
        """With TLS, called before `connection_made`: the client owes its side of the handshake.
        `transport` can only be aborted."""
        self.transport = transport
        self.connections.add(self)
        self._enter("idle")
        self._make_room()

    def handshake_failed(self) -> None:
        """Called instead of `connection_made` and `connection_lost`."""
        self._leave()
        self._forget_timer()
        self.connections.discard(self)
        self.parser = None  # type: ignore[assignment]  # it refers back to this

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = _Transport(transport, self._end)
        super().connection_made(cast(asyncio.Transport, self._socket))
        self.flow: _Flow = _Flow(transport)
        self._enter("idle")
        self._make_room()

    def _make_room(self) -> None:
        """Cut one client off if this connection is one too many."""
        if len(self.connections) > self._most_connections:
            owing = next(iter(_owing))
            if owing is self and _unread:
                next(iter(_unread))._cut()
            else:
                owing._on_cut("too_many")
                owing._abort()

    def _forget_timer(self) -> None:
        self._unset_keepalive_if_required()  # uvicorn does not if the client has reset it
        if self._timer is not None:
            self._timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._unparsed.clear()
        self._forget_timer()
        super().connection_lost(exc)
        self._socket.forget()
        for cycle, _ in self.pipeline:  # done at the end of a cycle, but these never begin
            cycle.on_response = lambda: None

    def _leave(self) -> None:
        """Await and write no more: all requests are disconnected (uvicorn marks only the last)."""
        _owing.pop(self, None)
        self._due = None
        self._stop_watching()
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unanswered.clear()

    def _abort(self) -> None:
        """Close at once; an orderly close would wait until the client reads its answer."""
        self._leave()
        self.transport.abort()

    def shutdown(self) -> None:
        """Do not make the server wait for clients that have their answers and are still sending."""
        super().shutdown()
        if self._phase == "end":
            self._socket.close_now()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open for an answer that is due. `False` makes asyncio close it."""
        if self.scheme == "https":
            return False
        self._has_closed_its_side = True
        if self._phase == "answer":
            if self._last_word is None:
                self._last_word = b""
            self._socket.count_written()
            self._wait(self.loop.time() + HALF_CLOSED_SECONDS)
        elif self._phase == "end":
            self._socket.close_now()
        else:
            self.transport.close()
        return True

    def data_received(self, data: bytes) -> None:
        if self._phase == "end":
            self._n_discarded += len(data)
            if self._n_discarded > LINGER_BYTES:
                self._socket.close_now()
            return
        if self._last_word is not None:
            return
        if len(data) <= PARSED_AT_ONCE and not self._unparsed:
            self._parse(data)
            return
        is_first = not self._unparsed
        self._unparsed += data
        if is_first:
            self.flow.begin_parsing()
            self._parse_in_turns()

    def _parse_in_turns(self) -> None:
        if self.transport.is_closing():
            return
        part = bytes(self._unparsed[:PARSED_AT_ONCE])
        del self._unparsed[:PARSED_AT_ONCE]
        self._parse(part)
        if self._unparsed:
            self.loop.call_soon(self._parse_in_turns)
        elif not self.transport.is_closing():
            self.flow.end_parsing()

    def _parse(self, data: bytes) -> None:
        self._n_overhead_bytes += len(data)
        if self._phase == "body":
            self.flow.was_paused = self.flow.read_paused
            self._wait(min(self._body_due, self.loop.time() + SECONDS["body"]))
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._parse_body_with_new_parser(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse("no_http")
            return
        if self._n_overhead_bytes > MAX_HEAD_BYTES:
            self._refuse("large_head")

    def _parse_body_with_new_parser(self, data: bytes) -> None:
        """Parse what follows the head of a request with `Upgrade`, which is answered in HTTP/1.1
        anyway (RFC 9110, 7.8).

        The old parser would take the body for data of the other protocol. The new one gets a
        stand-in head with nothing but the body's framing."""
        framing = b"".join(
            b"%s: %s\r\n" % header
            for header in self.scope["headers"]
            if header[0] in (b"content-length", b"transfer-encoding")
        )
        self.parser = _lenient(httptools.HttpRequestParser(self))
        self._parse(b"POST / HTTP/1.1\r\n%s\r\n%s" % (framing, data))

    def _should_upgrade(self) -> bool:
        return False

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        _owing.pop(self, None)
        if phase == "answer":
            self._due = None
        else:
            _owing[self] = None
            is_between = phase == "idle" and self.cycle is not None
            seconds = self.timeout_keep_alive if is_between else SECONDS[phase]
            self._wait(self.loop.time() + seconds)

    def on_message_begin(self) -> None:
        if self._phase == "body":
            return
        super().on_message_begin()
        self._has_begun = True
        if self._phase == "idle":
            self._enter("head")

    def on_headers_complete(self) -> None:
        if self._phase == "body":
            return
        # `_parse` does not check the read in which a head ends.
        n_bytes = len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n\r\n")
        n_bytes += sum([len(name) + len(value) + len(": \r\n") for name, value in self.headers])
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        fault: Cut | None = "large_head" if n_bytes > MAX_HEAD_BYTES else None
        # The parser only checks that chunked is the last coding.
        if codings and [each.strip().lower() for each in codings] != [b"chunked"]:
            fault = fault or "unknown_coding"
        if fault is not None:
            self._refuse(fault)
            raise ValueError(fault)  # so that the parser stops
        # This raises for an invalid target, before the request is recorded below.
        super().on_headers_complete()
        # What follows is a trailer. It must not change the request's headers (RFC 9110, 6.5.1).
        self.headers = []
        if self.scope["http_version"] != "1.1":
            _send_without_chunks(self.cycle)
        self._unanswered.append(self.cycle)
        self._has_begun = False
        self._n_overhead_bytes = 0
        self._enter("body")
        self._body_due = self.loop.time() + BODY_SECONDS

    def on_body(self, body: bytes) -> None:
        left = self._n_overhead_bytes - FRAMING_PER_BYTE * len(body)
        self._n_overhead_bytes = max(left, 0)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # The body is still to come, see `_parse_body_with_new_parser`.
        super().on_message_complete()
        self._n_overhead_bytes = 0
        # The request may have been answered before its body arrived, such as by a refusal.
        self._enter("answer" if self._unanswered else "idle")

    def on_response_complete(self) -> None:
        if self._unanswered:
            self._unanswered.popleft()
        super().on_response_complete()
        # A pipelined request's answer may still be due, or the rest of this request's body.
        if self._phase == "answer" and not self._unanswered and not self.transport.is_closing():
            if self._last_word is not None:
                self._close()
            else:
                self._enter("head" if self._has_begun else "idle")

    # --- answers that are not read ---

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()
        while len(_unread) > 1 and sum(map(_n_unread, _unread)) > MAX_UNREAD_BYTES:
            next(iter(_unread))._cut()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()
        if self._phase == "end":
            self._watch()

    def _watch(self) -> None:
        """Cut the client off if it reads no waiting byte for `_patience_seconds`."""
        if n_bytes := _n_unread(self):
            _unread[self] = None
            if self._unread_timer is not None:
                self._unread_timer.cancel()
            check, patience = self._check_unread, self._patience_seconds
            self._unread_timer = self.loop.call_later(patience, check, n_bytes)

    def _check_unread(self, n_before: int) -> None:
        n_bytes = _n_unread(self)
        if not n_bytes:
            self._stop_watching()
        elif n_bytes < n_before:
            self._watch()
        else:
            self._cut()

    def _cut(self) -> None:
        self._on_cut("unread_answer")
        self._abort()

    def _stop_watching(self) -> None:
        _unread.pop(self, None)
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    # --- requests that do not arrive ---

    def timeout_keep_alive_handler(self) -> None:
        """Do nothing, as uvicorn would close before it reads what arrived. See `_check_due`."""

    def _wait(self, due: float) -> None:
        """Set when `_check_due` acts on the client, on the loop's clock."""
        self._due = due
        if self._timer is not None and self._timer.when() > self._due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self.loop.call_at(self._due, self._check_due)

    def _check_due(self) -> None:
        self._timer = None
        if self._due is None:
            return
        now = self.loop.time()
        if now < self._due:
            self._timer = self.loop.call_at(self._due, self._check_due)
        elif (late := now - self._due) > HELD_SECONDS:
            self._body_due += late
            self._wait(now + HELD_SECONDS)
        elif self._phase == "body" and self.flow.was_paused:
            # The data may have arrived: reading pauses for an earlier answer or a slow application.
            self.flow.was_paused = self.flow.read_paused
            self._body_due += SECONDS["body"]
            self._wait(now + SECONDS["body"])
        elif self._phase == "idle":
            self._close()
        elif self._phase == "answer":
            n_written = self._socket.n_written
            if n_written == self._n_seen and not _n_unread(self):
                self._abort()
            else:
                self._n_seen = n_written
                self._wait(now + HALF_CLOSED_SECONDS)
        elif self._phase == "end":
            if _n_unread(self):
                self._wait(now + LINGER_SECONDS)
            else:
                self._socket.close_now()
        else:
            self._refuse("slow_request")

    def _refuse(self, reason: Cut) -> None:
        """Read no further, and close the connection once the earlier requests are answered. The
        refused request is answered with the reason, unless it already has an answer."""
        if self.transport.is_closing() or self._last_word is not None:
            return
        self._on_cut(reason)
        answer = _REFUSALS[reason]
        if self._phase == "body" and not self._unanswered:
            answer = b""
        elif self._phase == "body":
            own = self._unanswered[-1]
            if own.response_started:
                self._abort()
                return
            self._unanswered.pop()
            own.disconnected = True
            own.message_event.set()
            if self.pipeline:
                self.pipeline.popleft()  # It was queued, and must not begin.
        self._last_word = answer
        self._unparsed.clear()
        self._enter("answer")
        if not self._unanswered:
            self._close()

    def _close(self) -> None:
        self.transport.write(self._last_word or b"")
        self.transport.close()

    def _end(self) -> None:
        """Write no more. A client that may still be sending gets an end-of-file, and
        `LINGER_SECONDS` in which to read its answer and stop sending."""
        may_send = self._may_be_sending()
        self._leave()
        self._unparsed.clear()
        self._phase = "end"
        if may_send:
            if self.transport.can_write_eof():  # not with TLS
                self.transport.write_eof()
            self.transport.resume_reading()
            _owing[self] = None
            self._wait(self.loop.time() + LINGER_SECONDS)
        else:
            self._socket.close_now()
        self._watch()

    def _may_be_sending(self) -> bool:
        """Whether the client may have sent, or be sending, more than the answered requests."""
        if self._has_closed_its_side or self._phase == "idle":
            return False
        return (
            self._phase != "answer"
            or self._last_word is not None
            or self._has_begun
            or bool(self.pipeline or self._unparsed)
        )


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Answer a client that does not know chunked coding (RFC 9112, 6.1): an answer without
    `Content-Length` ends with the connection. uvicorn reads `cycle.send` only later, when it starts
    the application."""
    cycle.keep_alive = False
    cycle.waiting_for_100_continue = False  # such a client would take a 100 for its answer
    send = cycle.send
    is_open_ended = False

    async def send_plain(message: ASGISendEvent) -> None:
        nonlocal is_open_ended
        if message["type"] == "http.response.start":
            if b"content-length" not in {name.lower() for name, _ in message.get("headers", ())}:
                is_open_ended = True
                cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and is_open_ended:
            # uvicorn expects the announced length.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


def protocol_with(
    patience_seconds: float, on_cut: Callable[[Cut], None], files_each: int = 1
) -> type[WorkerProtocol]:
    """The protocol class to pass to uvicorn, which fills in the remaining arguments."""

    def cut(reason: Cut) -> None:
        _log.info("connection.cut", reason=reason)
        on_cut(reason)

    made = functools.partial(
        WorkerProtocol,
        patience_seconds=patience_seconds,
        on_cut=cut,
        most_connections=most_connections(files_each),
    )
    return cast(type[WorkerProtocol], made)


def most_connections(files_each: int) -> int:
    """The most connections, of `files_each` file descriptors each, that leave enough descriptors
    for everything else. Raises the process's soft limit as far as they need and the hard limit
    permits: without a free descriptor, the system resets every new connection, even a probe's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files_each * MAX_CONNECTIONS + OTHER_FILES
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, (min(wanted, soft) - OTHER_FILES) // files_each)


def _n_unread(connection: WorkerProtocol) -> int:
    return connection.transport.get_write_buffer_size()
