"""Questions to the engine beside its streams, each awaiting one reply.

Lives on the event loop of the API process and belongs to the supervisor.
"""

from __future__ import annotations

import asyncio
from typing import Any

from worker.errors import WorkerError
from worker.messages import Reply


class Calls:
    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._waiting)

    def open(self) -> tuple[int, asyncio.Future[Any]]:
        call_id, reply = self._next_id, asyncio.get_running_loop().create_future()
        self._next_id += 1
        self._waiting[call_id] = reply
        return call_id, reply

    def close(self, call_id: int) -> None:
        """Nobody waits for it any more; a reply that still comes is dropped."""
        self._waiting.pop(call_id, None)

    def on_reply(self, event: Reply) -> None:
        reply = self._waiting.get(event.call_id)
        if reply is None or reply.done():
            return
        if event.error is not None:
            reply.set_exception(event.error)
        else:
            reply.set_result(event.value)

    def fail_all(self, error: WorkerError) -> None:
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(error)
        self._waiting.clear()
