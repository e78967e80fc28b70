"""One client's connection: uvicorn's protocol with limits on what a client can hold open.

A connection is idle, in a head, in a body, or waits for its answer. In each phase but the last the
client owes something, and there is a time in which it must come (`SECONDS`). What one read brings
is parsed in turns of the event loop, because thousands of requests or chunks may be in it. A head
has a size limit, and so has what frames a body (the heads of chunks, a trailer). Answers that are
not read are bounded in time and in bytes. So is the number of connections: when one too many comes,
the one that has owed the rest of a request for longest is closed; if none does, the one that has
left its answer unread for longest.

A client takes whatever it reads for the answer to its oldest request. So a refusal waits until the
earlier requests are answered, and nothing is written where no request is open.

A socket that is closed before all that came is read resets the connection, and the client loses
what it has not read of its answer. So whoever may still be sending gets the answer and the end of
it; what it sends is thrown away for a while, and then the connection is closed.
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
"""The most bytes in a request's line and headers."""
Phase = Literal["idle", "head", "body", "answer", "end"]
SECONDS: Mapping[Phase, float] = {"idle": 20.0, "head": 20.0, "body": 20.0}
"""The most that a client may take: until its first request begins, for a request's line and
headers, for each pause in its body. Between requests it is uvicorn's `timeout_keep_alive`."""
BODY_SECONDS = 120.0
"""The most for a whole body."""
HELD_SECONDS = 1.0
"""A look at a client that comes later than due by more than this shows that this process did not
run. What came meanwhile is read first: the client has as long again."""
HALF_CLOSED_SECONDS = 1.0
"""A client that has closed its side after its request looks like one that has left. It is sent what
is ready. When for so long nothing was written and nothing is left to be taken, it is given up, so
that no more is computed for it."""
LINGER_SECONDS = 2.0
"""A client may go on sending for so long when it has its last answer."""
LINGER_BYTES = 48 * 2**20
"""The most that is read and thrown away meanwhile, which takes some 20 ms of computing."""
FRAMING_PER_BYTE = 8
"""Of a body, at most: a chunk of one byte has five around it."""
PARSED_AT_ONCE = 8 * 1024
"""Bytes that are parsed in one turn of the event loop, which takes some 5 ms at most."""
MAX_CONNECTIONS = 2048
MAX_UNREAD_BYTES = 256 * 2**20
"""Of all answers that wait for their clients to read them."""


def _refusal(status: str, text: str) -> bytes:
    head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    return f"{head}content-length: {len(text)}\r\n\r\n{text}".encode()


_REFUSALS: Mapping[Cut, bytes] = {
    "no_http": _refusal("400 Bad Request", "This is not a request of HTTP/1.1."),
    "large_head": _refusal(
        "431 Request Header Fields Too Large",
        f"A request's line and headers may have {MAX_HEAD_BYTES} bytes.",
    ),
    "unknown_coding": _refusal(
        "501 Not Implemented", "Of all transfer codings, this server knows chunked alone."
    ),
    "slow_request": _refusal(
        "408 Request Timeout", "The rest of the request did not come in time."
    ),
}

_log = get_logger()
_owing: OrderedDict[WorkerProtocol, None] = OrderedDict()
"""Connections whose client owes something, by the time since which it does."""
_unread: OrderedDict[WorkerProtocol, None] = OrderedDict()
"""Connections with an answer that is not being taken as fast as it is written."""


def _lenient(parser: Any) -> Any:
    """A parser that reads on behind `Connection: close`, as uvicorn obeys it: in a trailer
    it would have the next request swallowed."""
    parser.set_dangerous_leniencies(lenient_data_after_close=True, lenient_keep_alive=True)
    return parser


class _Flow(FlowControl):
    """Reads go on when uvicorn wants it and what was read has been parsed."""

    _is_parsing = False

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
    """uvicorn closes it where an answer ends. Then it is closing, and the protocol says when it is
    closed."""

    n_written = 0
    """Bytes since they are counted."""
    is_ending = False

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        self._transport, self._end = transport, end
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def count_written(self) -> None:
        """From here on."""

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
        """As soon as what was written has been taken."""
        self.is_ending = True
        self._transport.close()

    def forget(self) -> None:
        """The protocol, which would otherwise wait for a garbage collection."""
        self._end, self.write = lambda: None, self._transport.write


class WorkerProtocol(HttpToolsProtocol):
    """uvicorn's protocol within bounds."""

    _due: float | None = None
    """When the client must have sent what it owes."""
    _timer: asyncio.TimerHandle | None = None
    """Looks at `_due`: it is never later than that, and often earlier, so that a request costs no
    timer of its own."""
    _unread_timer: asyncio.TimerHandle | None = None
    _phase: Phase = "idle"
    _body_due = 0.0
    """When the body must have come, whatever its pauses."""
    _n_overhead_bytes = 0
    """Of the head that comes, or of what frames the body."""
    _has_begun = False
    """Whether a part of the next request's head has come."""
    _last_word: bytes | None = None
    """No further request is read. This is written when those before are answered, and then the
    connection is closed."""
    _has_closed_its_side = False
    _n_seen = 0
    """Bytes that had been written to a client that has, when it was last looked at."""
    _n_thrown_away = 0

    def __init__(
        self,
        *args: Any,
        patience_seconds: float,
        on_cut: Callable[[Cut], None],
        most_connections: int,
        **kwargs: Any,
    ) -> None:
        """`patience_seconds`: a client may leave an answer unread for so long; `on_cut` is told of
        each client that is cut off."""
        super().__init__(*args, **kwargs)
        _lenient(self.parser)
        self._most_connections = most_connections
        self._unparsed = bytearray()
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._patience_seconds, self._on_cut = patience_seconds, on_cut

    def connection_accepted(self, transport: asyncio.Transport) -> None:
        """With TLS, before `connection_made`: the client owes its side of the handshake. The
        transport can only be given up."""
        self.transport = transport
        self.connections.add(self)
        self._enter("idle")
        self._make_room()

    def handshake_failed(self) -> None:
        """There never is a `connection_made`."""
        self._leave()
        self._forget_timer()
        self.connections.discard(self)
        self.parser = None  # type: ignore[assignment]  # or it would keep this

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = _Transport(transport, self._end)
        super().connection_made(cast(asyncio.Transport, self._socket))
        self.flow: _Flow = _Flow(transport)
        self._enter("idle")
        self._make_room()

    def _make_room(self) -> None:
        """For this connection, if it is one too many."""
        if len(self.connections) > self._most_connections:
            owing = next(iter(_owing))
            if owing is self and _unread:
                next(iter(_unread))._cut()
            else:
                owing._on_cut("too_many")
                owing._abort()

    def _forget_timer(self) -> None:
        self._unset_keepalive_if_required()  # uvicorn does not where the client has reset it
        if self._timer is not None:
            self._timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._unparsed.clear()
        self._forget_timer()
        super().connection_lost(exc)
        self._socket.forget()
        for cycle, _ in self.pipeline:  # as its end would do, but it never begins
            cycle.on_response = lambda: None

    def _leave(self) -> None:
        """Nothing is written from here on: uvicorn tells that to the last request alone."""
        _owing.pop(self, None)
        self._due = None
        self._stop_watching()
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unanswered.clear()

    def _abort(self) -> None:
        """At once: closing politely would wait for bytes that are not taken."""
        self._leave()
        self.transport.abort()

    def shutdown(self) -> None:
        """The server's end does not wait for clients that have their answers and still send."""
        super().shutdown()
        if self._phase == "end":
            self._socket.close_now()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open, for an answer that is due. Never with TLS."""
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
            self._n_thrown_away += len(data)
            if self._n_thrown_away > LINGER_BYTES:
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
            self._wait(min(self._body_due, self.loop.time() + SECONDS["body"]))
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_with(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse("no_http")
            return
        if self._n_overhead_bytes > MAX_HEAD_BYTES:
            self._refuse("large_head")

    def _go_on_with(self, data: bytes) -> None:
        """Read on behind the head of a client that asks for another protocol. It is answered in
        this one (RFC 9110, 7.8).

        The parser takes the body for bytes of that protocol. So a new one reads on, which knows of
        the request how its body is framed, and nothing else."""
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
        # What was read before it was parsed may have been too much by a part.
        n_bytes = len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n\r\n")
        n_bytes += sum([len(name) + len(value) + len(": \r\n") for name, value in self.headers])
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        fault: Cut | None = "large_head" if n_bytes > MAX_HEAD_BYTES else None
        # The parser asks of codings only that chunked is the last.
        if codings and [each.strip().lower() for each in codings] != [b"chunked"]:
            fault = fault or "unknown_coding"
        if fault is not None:
            self._refuse(fault)
            raise ValueError(fault)  # so that the parser stops
        # It raises for a target that is none, and then there is no such request.
        super().on_headers_complete()
        # What follows is a trailer, which must not change what the headers have said (RFC 9110,
        # 6.5.1), or what `_parse` tells a new parser.
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
            return  # The body comes yet, see `_go_on_with`.
        super().on_message_complete()
        self._n_overhead_bytes = 0
        # An answer may have come before the body, such as a refusal.
        self._enter("answer" if self._unanswered else "idle")

    def on_response_complete(self) -> None:
        if self._unanswered:
            self._unanswered.popleft()
        super().on_response_complete()
        # The answer of a pipelined request may still be due, or the rest of this one's body.
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
        """Cut the client if it takes no byte of those that wait, however few, in its patience."""
        if n_bytes := _n_unread(self):
            _unread[self] = None
            if self._unread_timer is not None:
                self._unread_timer.cancel()
            look, patience = self._look_at_unread, self._patience_seconds
            self._unread_timer = self.loop.call_later(patience, look, n_bytes)

    def _look_at_unread(self, n_before: int) -> None:
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

    # --- requests that do not come ---

    def timeout_keep_alive_handler(self) -> None:
        """`_look` closes what is idle: uvicorn would do so before it reads what came."""

    def _wait(self, due: float) -> None:
        """Give the client up if it still owes the same at `due`, on the loop's clock."""
        self._due = due
        if self._timer is not None and self._timer.when() > self._due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self.loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._due is None:
            return
        now = self.loop.time()
        if now < self._due:
            self._timer = self.loop.call_at(self._due, self._look)
        elif (late := now - self._due) > HELD_SECONDS:
            self._body_due += late
            self._wait(now + HELD_SECONDS)
        elif self._phase == "body" and self.flow.read_paused:
            # It may have come: nothing is read while an earlier answer runs, or the app is behind.
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
        """Read no further, and close the connection when the earlier requests are answered; the
        one that is refused is told why, unless it has its answer."""
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
                self.pipeline.popleft()  # It has not begun, and never does.
        self._last_word = answer
        self._unparsed.clear()
        self._enter("answer")
        if not self._unanswered:
            self._close()

    def _close(self) -> None:
        self.transport.write(self._last_word or b"")
        self.transport.close()

    def _end(self) -> None:
        """Nothing more is written. A client that may be sending is told so, and has a time in which
        to read its answer and to stop."""
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
        """Whether more has come than the requests that are answered, or is still to come."""
        if self._has_closed_its_side or self._phase == "idle":
            return False
        return (
            self._phase != "answer"
            or self._last_word is not None
            or self._has_begun
            or bool(self.pipeline or self._unparsed)
        )


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """For clients that know no chunks (RFC 9112, 6.1): an answer that does not tell its length ends
    with the connection. uvicorn asks for `send` when the application begins, which is later."""
    cycle.keep_alive = False
    cycle.waiting_for_100_continue = False  # which such a client would take for the answer
    send = cycle.send
    is_open_ended = False

    async def send_plain(message: ASGISendEvent) -> None:
        nonlocal is_open_ended
        if message["type"] == "http.response.start":
            if b"content-length" not in {name.lower() for name, _ in message.get("headers", ())}:
                is_open_ended = True
                cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and is_open_ended:
            # uvicorn wants as much as was announced.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


def protocol_with(
    patience_seconds: float, on_cut: Callable[[Cut], None], files_each: int = 1
) -> type[WorkerProtocol]:
    """As uvicorn wants it, which fills in the rest of the arguments."""

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
    """So many that files are left for everything else, where each needs `files_each`. The process
    takes as many files as it may for them: where none is left, the system resets each new
    connection, also a probe's."""
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
