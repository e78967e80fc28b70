"""JSON encoding: compact UTF-8, which every parser sees as one line."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from json.encoder import encode_basestring
from typing import Any, Literal

import pydantic_core
from starlette.responses import Response, StreamingResponse

from worker.api.http.off_loop import in_background

KEEPALIVE = b": keep-alive\n\n"
"""A comment, sent while a stream of events is silent."""
LINE_KEEPALIVE = b" "
"""Sent while a stream of JSON lines is silent: parsers of the next line skip it. Some clients parse
empty lines, too."""
KEEPALIVES = {"text/event-stream": KEEPALIVE, "application/x-ndjson": LINE_KEEPALIVE}
"""The sign of life by the stream's media type."""
_BYTES_AT_ONCE = 64 * 1024
"""The size of the pieces in which a large answer is sent."""
MANY_VALUES = 4096
"""Fewer values are encoded on the event loop, which takes at most 4 ms. Handing a short answer to a
thread would take longer."""
_VALUES_AT_ONCE = 2048
"""The most values per call of the encoder, which takes a millisecond or two."""


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Iterator) else asdict(value)


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain)

# Parsers built on str.splitlines() end a line at these characters, which JSON need not escape.
_LINE_BREAKS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def rfc3339(
    unix_seconds: float, digits: Literal["milliseconds", "microseconds"] = "milliseconds"
) -> str:
    moment = datetime.fromtimestamp(unix_seconds, UTC)
    return moment.isoformat(timespec=digits).replace("+00:00", "Z")


def dumps(value: object) -> str:
    """`value` as JSON; a dataclass becomes an object, an iterator a list."""
    text = _JSON.encode(value)
    return text if text.isascii() else _in_one_line(text)


def quoted(text: str) -> str:
    """`text` as a JSON string; faster than `dumps`."""
    string = encode_basestring(text)
    return string if text.isascii() else _in_one_line(string)


def _in_one_line(text: str) -> str:
    for line_break, escaped in _LINE_BREAKS.items():  # `translate` is a hundred times slower
        text = text.replace(line_break, escaped)
    return text


def sse(event: Mapping[str, object], *, is_large: bool = False) -> bytes:
    """A server-sent event, named by its `type`."""
    return f"event: {event['type']}\n".encode() + data_event(event, is_large=is_large)


def data_event(value: object, *, is_large: bool = False) -> bytes:
    """A server-sent event without a name. A large one is encoded in parts, so that other threads
    can run between them."""
    return b"data: %b\n\n" % (b"".join(in_parts(value)) if is_large else dumps(value).encode())


def json_line(value: object) -> bytes:
    return f"{dumps(value)}\n".encode()


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(dumps(value).encode(), status, headers, "application/json")


async def json_answer(parts: Iterable[bytes], n_values: int) -> Response:
    """The answer whose JSON is the concatenation of `parts`. Many values are encoded off the event
    loop, and sent as the client reads them."""
    if n_values < MANY_VALUES:
        return Response(b"".join(parts), media_type="application/json")
    slices = await in_background(lambda: _slices(parts))

    async def each() -> AsyncIterator[bytes]:
        for part in slices:
            yield bytes(part)
            await asyncio.sleep(0)  # a fast client would otherwise leave the loop no turn

    length = str(sum(map(len, slices)))
    return StreamingResponse(
        each(), headers={"Content-Length": length}, media_type="application/json"
    )


def in_parts(value: object) -> Iterator[bytes]:
    """The output of `dumps` in parts. Each takes a few milliseconds, during which no other thread
    runs. An `array` of numbers becomes a list.

    Iterators are consumed lazily. As one value, megabytes of JSON would be a hundred thousand
    objects, and the garbage collection that they cause stops every thread.
    """
    if isinstance(value, dict):
        before = "{"
        for name, each in value.items():
            yield f"{before}{quoted(name)}:".encode()
            yield from in_parts(each)
            before = ","
        yield b"}" if value else b"{}"
    elif isinstance(value, list | tuple | Iterator):
        before, few, n_few = "[", list[object](), 0
        for each in value:
            n_values = _count_values(each)
            if few and n_few + n_values > _VALUES_AT_ONCE:
                yield f"{before}{dumps(few)[1:-1]}".encode()
                before, few, n_few = ",", [], 0
            if n_values > _VALUES_AT_ONCE:
                yield before.encode()
                yield from in_parts(each)
                before = ","
            else:
                few.append(each)
                n_few += n_values
        yield f"{before if few or before == '[' else ''}{dumps(few)[1:-1]}]".encode()
    elif isinstance(value, array):
        yield b"["
        for at in range(0, len(value), _VALUES_AT_ONCE):
            # For numbers, ten times as fast as the standard library's encoder.
            some = pydantic_core.to_json(value[at : at + _VALUES_AT_ONCE].tolist())
            yield (b"," if at else b"") + some[1:-1]
        yield b"]"
    else:
        yield dumps(value).encode()


def _count_values(value: object) -> int:
    """How many values `value` has; a long string counts as several, because it takes as long."""
    if isinstance(value, int | float):
        return 1
    if isinstance(value, str):
        return 1 + len(value) // 1024
    if isinstance(value, dict):
        return 1 + sum(map(_count_values, value.values()))
    if isinstance(value, list | tuple):
        return 1 + sum(map(_count_values, value))
    return _VALUES_AT_ONCE + 1 if isinstance(value, Iterator | array) else 1


def _slices(parts: Iterable[bytes]) -> list[bytearray]:
    slices = [bytearray()]
    for part in parts:
        if len(slices[-1]) >= _BYTES_AT_ONCE:
            slices.append(bytearray())
        slices[-1] += part
    return slices
