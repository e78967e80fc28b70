"""Streamed answers, and the end of their jobs.

`EventStream.__call__` ends the jobs in its `finally`: a generator is not notified when its client
leaves during a blocked `send`. Starlette's own method uses an anyio task group, whose cancellation
leaves a reference cycle that keeps the job and the body until a full garbage collection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from worker.api.http.headers import UNBUFFERED
from worker.errors import Cancelled
from worker.supervisor.job import Job


class EventStream(StreamingResponse):
    """A stream of encoded chunks; `on_end` is called when it ends, however it does. A HEAD request
    gets the headers only; its client's next request would wait for the end of the stream."""

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        on_end: Callable[[], None] = lambda: None,
        media_type: str = "text/event-stream; charset=utf-8",
    ) -> None:
        super().__init__(chunks, headers=UNBUFFERED, media_type=media_type)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            self.body_iterator = _nothing()
        streaming = asyncio.ensure_future(self.stream_response(send))
        try:
            async with while_connected(receive, streaming.cancel):
                await asyncio.wait({streaming})
                if not streaming.cancelled():
                    streaming.result()
        finally:
            self._on_end()
            await asyncio.wait({streaming})


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield


def cancel_all(jobs: Iterable[Job]) -> None:
    for job in jobs:
        job.cancel()


@asynccontextmanager
async def while_connected(
    receive: Receive, give_up: Callable[[], object], *, may_leave: bool = False
) -> AsyncIterator[asyncio.Event]:
    """Call `give_up` if the block fails, or if the client leaves during it unless it `may_leave`.

    Yields an event that is set in the latter case; a `Cancelled` of the block then becomes a
    `ClientDisconnect`. A client that left earlier is noticed in the next turn of the loop.
    """
    left = asyncio.Event()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not may_leave:
            left.set()
            give_up()

    watcher = asyncio.create_task(watch())
    try:
        yield left
    except BaseException as error:
        give_up()
        if left.is_set() and isinstance(error, Cancelled):
            raise ClientDisconnect() from None
        raise
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
