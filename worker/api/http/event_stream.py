"""Answers that stream: kept alive while silent, and their jobs' end.

There is one `send` per engine frame, whatever its number of events. `EventStream.__call__` cancels
the jobs in its `finally`: a generator is not notified when its client leaves during a blocked
`send`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from worker.api.http.encoding import KEEPALIVE
from worker.api.http.state import AppState
from worker.supervisor.job import Job

_SSE_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class Ended(Protocol):
    """What ends with a stream: a job, or the reading of a log."""

    def cancel(self) -> None: ...


class EventStream(StreamingResponse):
    """A stream of encoded chunks that stays alive while silent; `jobs` end with it."""

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        state: AppState,
        jobs: Iterable[Ended],
        media_type: str = "text/event-stream; charset=utf-8",
        *,
        keeps_alive: bool = True,
    ) -> None:
        super().__init__(chunks, headers=_SSE_HEADERS, media_type=media_type)
        self._jobs = jobs
        sse = media_type.startswith("text/event-stream")
        self._keepalive = float(state.settings.keepalive) if sse and keeps_alive else 0.0
        self._is_blocked = False
        self._last_sent = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._extra: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            cancel_all(self._jobs)

    async def stream_response(self, send: Send) -> None:
        await self._send(
            send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        )
        if self._keepalive > 0:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._keepalive, self._tick, loop, send)
        try:
            async for chunk in self.body_iterator:
                if self._extra is not None:
                    await self._extra
                await self._send(
                    send, {"type": "http.response.body", "body": chunk, "more_body": True}
                )
        finally:
            if self._timer is not None:
                self._timer.cancel()
        if self._extra is not None:
            await self._extra
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        self._last_sent, self._is_blocked = time.monotonic(), True
        await send(message)
        self._is_blocked = False

    def _tick(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        """Speak when all is silent. It looks after each period, at no cost per event."""
        self._timer = loop.call_later(self._keepalive, self._tick, loop, send)
        if not self._is_blocked and time.monotonic() - self._last_sent >= 0.99 * self._keepalive:
            message = {"type": "http.response.body", "body": KEEPALIVE, "more_body": True}
            self._extra = loop.create_task(self._send(send, message))
            self._extra.add_done_callback(self._forget_extra)

    def _forget_extra(self, task: asyncio.Task[None]) -> None:
        self._extra = None


def cancel_all(jobs: Iterable[Ended]) -> None:
    for job in jobs:
        job.cancel()


@asynccontextmanager
async def watching(request: Request, *jobs: Job) -> AsyncIterator[None]:
    """Cancel the jobs if the client leaves inside this block, before any byte is sent."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        cancel_all(jobs)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher


@asynccontextmanager
async def closing_on_disconnect(request: Request, *jobs: Job) -> AsyncIterator[None]:
    """Cancel the jobs when the client leaves and, at the latest, at the end of this block."""
    try:
        async with watching(request, *jobs):
            yield
    finally:
        cancel_all(jobs)
