"""The body of a request in pieces."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from worker.api.http.body import received


@pytest.mark.anyio
async def test_a_body_in_tiny_pieces_takes_no_more_memory_than_its_bytes() -> None:
    pieces = iter([b"  "] * 100_000)

    async def receive() -> dict[str, Any]:
        piece = next(pieces, b"")
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    reading = SimpleNamespace(body_bytes=0)
    request = Request({"type": "http", "headers": [], "app": reading}, receive)
    async with received(request, 2**22) as body:
        assert len(body) == 200_000 and sys.getsizeof(body) < 250_000
        assert reading.body_bytes == 200_000
    assert reading.body_bytes == 0
