"""One client's connection: uvicorn's protocol with bounds on what a client may hold open.

A header has a size and a time limit, a body a time limit. The number of connections is bounded:
when one too many comes, the one that has been silent for longest is closed. Runs on the API
process's event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

ABORT = "llorch.abort"
"""The scope's extension that cuts a connection at its transport: closing politely would wait for
the very bytes that a client which stopped reading does not take."""
MAX_HEAD_BYTES = 64 * 1024
"""Of a request's line and headers."""
HEAD_SECONDS = 20.0
"""For them to arrive; also for the first request of a connection to begin."""
BODY_SECONDS = 120.0
MAX_CONNECTIONS = 2048

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

_silent: OrderedDict[WorkerProtocol, None] = OrderedDict()
"""Connections without a whole header in progress, the oldest first."""


class WorkerProtocol(HttpToolsProtocol):
    """uvicorn's protocol within bounds, whose scope carries `extensions["llorch.abort"]`."""

    _timer: asyncio.TimerHandle | None = None
    _in_head = True
    _n_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _silent[self] = None
        if len(self.connections) > MAX_CONNECTIONS:
            victim, _ = _silent.popitem(last=False)
            victim.transport.abort()
        self._wait(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        _silent.pop(self, None)
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            if not self._n_head_bytes:
                self._wait(HEAD_SECONDS)  # a request on a connection that was kept alive
            self._n_head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._n_head_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = {**(self.scope.get("extensions") or {})}
        extensions[ABORT] = self.transport.abort
        self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._n_head_bytes = 0
        _silent.pop(self, None)
        self._wait(BODY_SECONDS)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._stop_waiting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            _silent[self] = None

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, self._refuse, _TOO_SLOW)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, answer: bytes) -> None:
        """Answer where no answer has begun, and close."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if getattr(self.cycle, "response_complete", True):  # there may be none yet
            self.transport.write(answer)
            self.transport.close()
        else:
            self.transport.abort()
