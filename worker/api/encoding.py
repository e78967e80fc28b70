"""JSON as it is sent: compact UTF-8 that every parser sees as one line. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from json.encoder import encode_basestring

from starlette.responses import Response

# Parsers built on str.splitlines() end a line at these characters; JSON need not escape them.
_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def dumps(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if text.isascii() else text.translate(_LINE_BREAKS)


def quoted(text: str) -> str:
    """A text as a JSON string; cheaper than `dumps`."""
    string = encode_basestring(text)
    return string if text.isascii() else string.translate(_LINE_BREAKS)


def sse(event: Mapping[str, object]) -> bytes:
    """One server-sent event, named by its `type`."""
    return f"event: {event['type']}\ndata: {dumps(event)}\n\n".encode()


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(dumps(value).encode(), status, headers, "application/json")
