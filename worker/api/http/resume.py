"""Which streams are kept for a reader that comes back, and how it comes back. On the event loop."""

from __future__ import annotations

from functools import partial
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from worker.api.http.event_stream import EventStream
from worker.api.http.faults import refusal
from worker.api.http.gate import tokens_in
from worker.api.http.headers import (
    BEGAN,
    CONVERSATION,
    LAST_EVENT_ID,
    OWNER,
    RESUME,
    Described,
)
from worker.api.http.state import AppState
from worker.api.http.stream_log import StreamLog
from worker.observability.logs import digest

KEEPING = (RESUME, CONVERSATION, OWNER)
"""What is read of a request whose stream may be kept."""
READING = (LAST_EVENT_ID, OWNER)
"""What is read of one that goes on with a kept stream."""
FROM: dict[str, Described] = {
    "from": {
        "description": "the byte at which to go on, where no Last-Event-ID is given",
        "schema": {"type": "integer", "minimum": 0, "maximum": 10**18 - 1, "default": 0},
    }
}
"""What is read of its address."""


_STEPS = (".", "..")
"""What clients take out of a path as steps in it, however they are written."""


def names_asked(request: Request, id: str, state: AppState) -> tuple[str, ...]:
    """The names under which a stream is to be kept; none if it is not."""
    conversation = CONVERSATION.of(request)
    resumes = RESUME.of(request) == "1"
    if not (conversation or resumes) or not state.settings.resume_seconds:
        return ()
    if resumes and id in _STEPS:
        what = f"must not be {id} beside {RESUME.name}: a path cannot end with it"
        raise refusal("job_id", "pattern", what)
    return (conversation, id) if conversation else (id,)


def in_a_path(id: str) -> str:
    """A stream's id as the path of who goes on with it has it, and as a header can have it. A slash
    at a path's end is no part of it."""
    name = id.rstrip("/")
    return quote(name, safe="/:@!$&'()*+,;=") + quote(id[len(name) :], safe="")


def owner_of(scope: Scope) -> str:
    """Who asks: a digest of the credential, and of the client that a gateway names. It is empty
    where there is neither. A client that names one itself is an owner without streams."""
    parts = [*(tokens_in(scope)[:1] or [""]), *OWNER.all(scope)]
    return digest("\0".join(parts).encode("latin-1")) if any(parts) else ""


def reading(log: StreamLog, offset: int, state: AppState) -> EventStream:
    """The stream from an offset on; it ends without harm to the log."""
    chunks = log.read(offset)
    state.streams.reading(log, 1)
    return EventStream(chunks, partial(state.streams.reading, log, -1), log.media_type)


def go_on(request: Request, state: AppState, name: str) -> Response:
    """A kept stream, behind the event that `Last-Event-ID` names, or from the byte `from` on.

    Raises:
        JobNotFound: no stream of that name is kept for who asks.
        InvalidRequest: the stream has no such place, or not any more.
    """
    log = state.streams.find(owner_of(request.scope), name)
    last = LAST_EVENT_ID.of(request)
    if last is not None:
        offset = log.behind(_number(last, LAST_EVENT_ID.name))
    else:
        offset = _number(request.query_params.get("from") or "0", "from")
    if request.method == "HEAD":  # it reads nothing, and keeps the stream for nobody
        stream = EventStream(log.read(offset), media_type=log.media_type)
    else:
        stream = reading(log, offset, state)
    stream.headers[BEGAN.name] = f"{log.began_at:.6f}"
    return stream


def _number(text: str, field: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise refusal(field, "type", "must be a number of 0 or more")
    return int(text)
