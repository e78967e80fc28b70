"""Decides which streams are kept, and lets readers resume them. Runs on the event loop."""

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
"""The headers read from a request whose stream may be kept."""
READING = (LAST_EVENT_ID, OWNER)
"""The headers read from a request that resumes a stream."""
FROM: dict[str, Described] = {
    "from": {
        "description": "byte offset at which to resume, if there is no Last-Event-ID",
        "schema": {"type": "integer", "minimum": 0, "maximum": 10**18 - 1, "default": 0},
    }
}
"""Its query parameter."""

_STEPS = (".", "..")
"""Path segments that clients resolve and remove, even if percent-encoded."""


def names_asked(request: Request, id: str, state: AppState) -> tuple[str, ...]:
    """The names under which to keep the request's stream; empty if it is not kept."""
    conversation = CONVERSATION.of(request)
    resumes = RESUME.of(request) == "1"
    if not (conversation or resumes) or not state.settings.resume_seconds:
        return ()
    if resumes and id in _STEPS:
        what = f"must not be {id} with {RESUME.name}: the path to resume it cannot end like that"
        raise refusal("job_id", "pattern", what)
    return (conversation, id) if conversation else (id,)


def in_a_path(id: str) -> str:
    """A stream's id, quoted for the path that resumes it and for a header. Slashes at its end are
    encoded, because those at a path's end are ignored."""
    name = id.rstrip("/")
    return quote(name, safe="/:@!$&'()*+,;=") + quote(id[len(name) :], safe="")


def owner_of(scope: Scope) -> str:
    """The requester: a digest of its credential and of the client that a gateway names; empty if
    there is neither. A client that names one itself merely becomes an owner without streams."""
    parts = [*(tokens_in(scope)[:1] or [""]), *OWNER.all(scope)]
    return digest("\0".join(parts).encode("latin-1")) if any(parts) else ""


def reading(log: StreamLog, offset: int, state: AppState) -> EventStream:
    """The stream from `offset` on. If its reader leaves, the log is kept."""
    chunks = log.read(offset)
    state.streams.reading(log, 1)
    return EventStream(chunks, partial(state.streams.reading, log, -1), log.media_type)


def go_on(request: Request, state: AppState, name: str) -> Response:
    """Resume a kept stream after the event that `Last-Event-ID` names, or at the byte `from`.

    Raises:
        JobNotFound: no stream of that name is kept for the requester.
        InvalidRequest: the position does not exist yet, or is no longer kept.
    """
    log = state.streams.find(owner_of(request.scope), name)
    last = LAST_EVENT_ID.of(request)
    if last is not None:
        offset = log.offset_after(_number(last, LAST_EVENT_ID.name))
    else:
        offset = _number(request.query_params.get("from") or "0", "from")
    if request.method == "HEAD":  # does not count as a reader
        stream = EventStream(log.read(offset), media_type=log.media_type)
    else:
        stream = reading(log, offset, state)
    stream.headers[BEGAN.name] = f"{log.began_at:.6f}"
    return stream


def _number(text: str, field: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise refusal(field, "type", "must be a non-negative integer")
    return int(text)
