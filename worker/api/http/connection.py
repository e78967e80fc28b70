"""One client's connection: uvicorn's protocol with limits on what a client can hold open.

A connection is idle, in a head, in a body, or waits for its answer. In each phase but the last the
client owes something, and there is a time in which it must come (`SECONDS`). What one read brings
is parsed in turns of the event loop, because thousands of requests or chunks may be in it. A head
has a size limit, and so has what frames a body (the heads of chunks, a trailer). Answers that are
not read are bounded in time and in bytes. So is the number of connections: when one too many comes,
the one that has owed the rest of a request for longest is closed; if none does, the one that has
left its answer unread for longest.
"""

from __future__ import annotations

import asyncio
import functools
import resource
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 * 1024
"""The most bytes in a request's line and headers."""
Phase = Literal["idle", "head", "body", "answer"]
SECONDS: Mapping[Phase, float] = {"idle": 20.0, "head": 20.0, "body": 20.0}
"""The most that a client may take: until a request begins, for its line and headers, for each pause
in its body. uvicorn closes an idle connection earlier, unless it has answered before the body."""
BODY_SECONDS = 120.0
"""The most for a whole body."""
HALF_CLOSED_SECONDS = 1.0
"""What is answered so soon is sent to a client that has closed its side after its request. One that
has left looks the same, so nothing more is computed for it."""
FRAMING_PER_BYTE = 8
"""Of a body, at most: a chunk of one byte has five around it."""
PARSED_AT_ONCE = 8 * 1024
"""Bytes that are parsed in one turn of the event loop, which takes some 5 ms at most."""
MAX_CONNECTIONS = 2048
OTHER_FILES = 64
"""That this process opens at once beside its connections, at most."""
MAX_UNREAD_BYTES = 256 * 2**20
"""Of all answers that wait for their clients to read them."""


def _refusal(status: str, text: str) -> bytes:
    head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    return f"{head}content-length: {len(text)}\r\n\r\n{text}".encode()


_BAD_REQUEST = _refusal("400 Bad Request", "This is not a request of HTTP/1.1.")
_TOO_LARGE = _refusal(
    "431 Request Header Fields Too Large",
    f"A request's line and headers may have {MAX_HEAD_BYTES} bytes.",
)
_TOO_SLOW = _refusal("408 Request Timeout", "The rest of the request did not come in time.")

_owing: OrderedDict[WorkerProtocol, None] = OrderedDict()
"""Connections whose client owes something, by the time since which it does."""
_unread: OrderedDict[WorkerProtocol, None] = OrderedDict()
"""Connections with an answer that is not being taken as fast as it is written."""


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
    _n_head_bytes = 0
    _n_framing_bytes = 0
    _is_half_closed = False

    def __init__(
        self,
        *args: Any,
        patience_seconds: float,
        on_cut: Callable[[], None],
        most_connections: int = MAX_CONNECTIONS,
        **kwargs: Any,
    ) -> None:
        """`patience_seconds`: a client may leave an answer unread for so long; `on_cut` counts
        those that did."""
        super().__init__(*args, **kwargs)
        self._most_connections = most_connections
        self._unparsed = bytearray()
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._patience_seconds, self._on_cut = patience_seconds, on_cut

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport)
        self._enter("idle")
        if len(self.connections) > self._most_connections:
            owing = next(iter(_owing))
            if owing is self and _unread:
                next(iter(_unread))._cut()
            else:
                owing._abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._unparsed.clear()
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

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

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open, for an answer that is due. Never with TLS."""
        if self._phase != "answer" or self.scheme == "https":
            return False
        self._is_half_closed = True
        self._wait(self.loop.time() + HALF_CLOSED_SECONDS)
        return True

    def data_received(self, data: bytes) -> None:
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
        if self._phase == "idle":
            self._enter("head")
        if self._phase == "body":
            self._n_framing_bytes += len(data)
            self._wait(min(self._body_due, self.loop.time() + SECONDS["body"]))
        else:
            self._n_head_bytes += len(data)
        super().data_received(data)
        n_bytes = self._n_framing_bytes if self._phase == "body" else self._n_head_bytes
        if n_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LARGE)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        _owing.pop(self, None)
        if phase == "answer":
            self._due = None
        else:
            _owing[self] = None
            self._wait(self.loop.time() + SECONDS[phase])

    def on_headers_complete(self) -> None:
        self._n_head_bytes = self._n_framing_bytes = 0
        self._enter("body")
        self._body_due = self.loop.time() + BODY_SECONDS
        super().on_headers_complete()
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        left = self._n_framing_bytes - FRAMING_PER_BYTE * len(body)
        self._n_framing_bytes = max(left, 0)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        # An answer may have come before the body, such as a refusal.
        self._enter("answer" if self._unanswered else "idle")

    def on_response_complete(self) -> None:
        if self._unanswered:
            self._unanswered.popleft()
        super().on_response_complete()
        # The answer of a pipelined request may still be due, or the rest of this one's body.
        if self._phase == "answer" and not self._unanswered and not self.transport.is_closing():
            if self._is_half_closed:
                self.transport.close()
            else:
                self._enter("idle")

    # --- answers that are not read ---

    def pause_writing(self) -> None:
        super().pause_writing()
        _unread[self] = None
        while len(_unread) > 1 and sum(map(_n_unread, _unread)) > MAX_UNREAD_BYTES:
            next(iter(_unread))._cut()
        self._watch(_n_unread(self))

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _watch(self, n_bytes: int) -> None:
        """Cut the client if it has not taken one of these bytes when its patience ends."""

        def look() -> None:
            left = _n_unread(self)
            if left < n_bytes:
                self._watch(left)
            else:
                self._cut()

        self._unread_timer = self.loop.call_later(self._patience_seconds, look)

    def _cut(self) -> None:
        self._on_cut()
        self._abort()

    def _stop_watching(self) -> None:
        _unread.pop(self, None)
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    # --- requests that do not come ---

    def _wait(self, due: float) -> None:
        """Refuse the client if it still owes the same at `due`, on the loop's clock."""
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
        if self.loop.time() < self._due:
            self._timer = self.loop.call_at(self._due, self._look)
        else:
            self._refuse(_TOO_SLOW)

    def send_400_response(self, msg: str) -> None:
        self._refuse(_BAD_REQUEST)

    def _refuse(self, answer: bytes) -> None:
        """Close the connection, with this answer if it can be no other request's."""
        if self.transport.is_closing():
            return
        own = self._unanswered[-1] if self._phase == "body" and self._unanswered else None
        if any(cycle.response_started or cycle is not own for cycle in self._unanswered):
            self._abort()
        else:
            self._leave()
            self.transport.write(answer)
            self.transport.close()


def protocol_with(patience_seconds: float, on_cut: Callable[[], None]) -> type[WorkerProtocol]:
    """As uvicorn wants it, which fills in the rest of the arguments."""
    made = functools.partial(
        WorkerProtocol,
        patience_seconds=patience_seconds,
        on_cut=on_cut,
        most_connections=most_connections(),
    )
    return cast(type[WorkerProtocol], made)


def most_connections() -> int:
    """So many that files are left for everything else. The process takes as many files as it may
    for them: where none is left, the system resets each new connection, also a probe's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return (
        MAX_CONNECTIONS
        if soft == resource.RLIM_INFINITY
        else max(1, min(wanted, soft) - OTHER_FILES)
    )


def _n_unread(connection: WorkerProtocol) -> int:
    return connection.transport.get_write_buffer_size()
