"""One accepted request as its consumer sees it: a stream of event lists, one per engine frame.

Lives on the event loop of the API process. The supervisor feeds it, exactly one response reads
it; frames that arrive while the reader is busy are handed over together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from worker.messages import Failed, Finished, Started, Token

StreamEvent = Started | Token | Finished | Failed


class Generation:
    """Iterate it for lists of events; it ends after the terminal event."""

    __slots__ = ("_cancel", "_ended", "_pending", "_waiter", "job_id", "prompt_tokens",
                 "request_id", "seed")  # fmt: skip

    def __init__(
        self,
        job_id: str,
        request_id: int,
        prompt_tokens: int,
        seed: int,
        cancel: Callable[[], None],
    ) -> None:
        self.job_id = job_id
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.seed = seed
        self._cancel = cancel
        self._pending: list[StreamEvent] = []
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def cancel(self) -> None:
        """Give the request up: its reader gets `Failed(Cancelled)` unless it has ended already."""
        self._cancel()

    def feed(self, events: list[StreamEvent], *, last: bool = False) -> None:
        """Append a frame's events; `last` marks that the terminal one is among them."""
        assert not self._ended, "an event after the terminal one"
        self._pending += events
        self._ended = last
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[list[StreamEvent]]:
        return self

    async def __anext__(self) -> list[StreamEvent]:
        while not self._pending:
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._pending = self._pending, []
        return events
