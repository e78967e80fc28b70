"""Which streams are kept for a reader that comes back, and how it comes back. On the event loop."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from worker.api.http.event_stream import EventStream
from worker.api.http.faults import refusal
from worker.api.http.gate import Head, head_of, tokens_in
from worker.api.http.state import AppState
from worker.api.http.stream_log import StreamLog
from worker.observability.logs import digest

RESUME = "x-llorch-resume"
"""With this header set to 1, a stream is kept under its answer's id, which the same header of the
answer tells."""
CONVERSATION = "x-conversation-id"
"""A stream with this header is kept under that name too, as llama-server does."""

BEGAN = "x-llorch-began"
"""Of a kept stream: when it began, in Unix seconds. A gateway reads the latest of its workers'."""

OWNER = b"x-llorch-owner"
"""What a gateway tells its clients apart by, all of which have its own credential here."""


def names_asked(request: Request, id: str, state: AppState) -> tuple[str, ...]:
    """The names under which a stream is to be kept; none if it is not."""
    conversation = request.headers.get(CONVERSATION)
    asks = conversation or request.headers.get(RESUME) == "1"
    if not asks or not state.streams.are_kept:
        return ()
    return (conversation, id) if conversation else (id,)


def owner_of(request: Request) -> str:
    """Who asks: a digest of the credential, which is empty where none is sent; of a gateway's, with
    that of its client. Whoever else sends that header becomes nobody who has a stream."""
    return owner_in(head_of(request.scope["headers"]))


def owner_in(head: Head) -> str:
    parts = [*(tokens_in(head)[:1] or [b""]), *head.get(OWNER, ())]
    return digest(b"\0".join(parts)) if any(parts) else ""


def reading(log: StreamLog, offset: int, state: AppState) -> EventStream:
    """The stream from an offset on; it ends without harm to the log."""
    chunks = log.read(offset)
    state.streams.reading(log, 1)
    return EventStream(chunks, partial(state.streams.reading, log, -1), log.media_type)


def go_on(request: Request, state: AppState, name: str) -> Response:
    """A kept stream, behind the event that `Last-Event-ID` names, or from the byte `from` on; of
    HEAD its head alone.

    Raises:
        JobNotFound: no stream of that name is kept for who asks.
        InvalidRequest: the stream has no such place, or not any more.
    """
    log = state.streams.find(owner_of(request), name)
    last = request.headers.get("last-event-id")
    if last is not None:
        offset = log.behind(_number(last, "Last-Event-ID"))
    else:
        offset = _number(request.query_params.get("from") or "0", "from")
    stream = Response(media_type=log.media_type)
    if request.method != "HEAD":
        stream = reading(log, offset, state)
    stream.headers[BEGAN] = f"{log.began_at:.6f}"
    return stream


def _number(text: str, field: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise refusal(field, "type", "must be a number of 0 or more")
    return int(text)
