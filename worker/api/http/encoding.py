"""JSON as it is sent: compact UTF-8 that every parser sees as one line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from json.encoder import encode_basestring
from typing import Literal

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from worker.background import background_thread

KEEPALIVE = b": keep-alive\n\n"
"""A comment in a silent stream of events."""
_SENT_AT_ONCE = 64 * 1024
_AT_ONCE = 64
"""Members of a list that are encoded at once; each may have 20 alternatives."""
_encoders = background_thread("answers")

# Parsers built on str.splitlines() end a line at these characters; JSON need not escape them.
_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def rfc3339(moment: datetime, digits: Literal["milliseconds", "microseconds"]) -> str:
    """A time in UTC."""
    return moment.astimezone(UTC).isoformat(timespec=digits).replace("+00:00", "Z")


def dumps(value: object) -> str:
    """A record in it, which is a dataclass, is written as an object."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=asdict)
    return text if text.isascii() else text.translate(_LINE_BREAKS)


def quoted(text: str) -> str:
    """A text as a JSON string; cheaper than `dumps`."""
    string = encode_basestring(text)
    return string if text.isascii() else string.translate(_LINE_BREAKS)


def sse(event: Mapping[str, object]) -> bytes:
    """One server-sent event, named by its `type`."""
    return f"event: {event['type']}\ndata: {dumps(event)}\n\n".encode()


def data_event(value: object) -> bytes:
    """One server-sent event without a name."""
    return f"data: {dumps(value)}\n\n".encode()


def json_line(value: object) -> bytes:
    return f"{dumps(value)}\n".encode()


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(dumps(value).encode(), status, headers, "application/json")


async def sliced(parts: Iterable[bytes]) -> Response:
    """JSON of megabytes, encoded part by part on a thread and sent as the client takes it.

    One answer is encoded at a time, so that the event loop competes with one thread only.
    """
    slices = await asyncio.get_running_loop().run_in_executor(_encoders, _slices, parts)

    async def each() -> AsyncIterator[bytes]:
        for part in slices:
            yield part

    length = str(sum(map(len, slices)))
    return StreamingResponse(
        each(), headers={"Content-Length": length}, media_type="application/json"
    )


class LargeAnswer(Response):
    """JSON of megabytes, whose parts are also made on that thread."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        super().__init__()
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await sliced(self._parts)
        await response(scope, receive, send)


def in_parts(value: object) -> Iterator[bytes]:
    """What `dumps` writes, in parts that take a few milliseconds, during which no other thread
    runs: long lists are cut."""
    if isinstance(value, dict):
        before = "{"
        for name, each in value.items():
            yield f"{before}{quoted(name)}:".encode()
            yield from in_parts(each)
            before = ","
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and len(value) > _AT_ONCE:
        before = "["
        for at in range(0, len(value), _AT_ONCE):
            yield f"{before}{dumps(value[at : at + _AT_ONCE])[1:-1]}".encode()
            before = ","
        yield b"]"
    else:
        yield dumps(value).encode()


def _slices(parts: Iterable[bytes]) -> list[bytes]:
    slices, waiting, n_bytes = [], [], 0
    for part in parts:
        waiting.append(part)
        n_bytes += len(part)
        if n_bytes >= _SENT_AT_ONCE:
            slices.append(b"".join(waiting))
            waiting, n_bytes = [], 0
    return [*slices, b"".join(waiting)]
