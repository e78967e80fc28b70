"""The body of a request in pieces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from worker.api.http.body import parts_of


@pytest.mark.anyio
async def test_a_body_in_tiny_pieces_takes_no_more_memory_than_its_bytes() -> None:
    pieces = iter([b"  "] * 100_000)

    async def receive() -> dict[str, Any]:
        piece = next(pieces, b"")
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    reading = SimpleNamespace(body_bytes=0)
    request = Request({"type": "http", "headers": [], "app": reading}, receive)
    async with parts_of(request, 2**22) as parts:
        assert [len(part) for part in parts] == [65_536] * 3 + [200_000 - 3 * 65_536]
        assert reading.body_bytes == 200_000
    assert reading.body_bytes == 0
