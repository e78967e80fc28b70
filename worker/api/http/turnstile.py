"""Keeps a burst of requests from delaying everything else on the API process's event loop.

Otherwise a thousand requests that arrive together, or hundreds that the engine accepts in one
frame, would all be handled before the loop reads its sockets again. Probes of `/health` would have
to wait.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Lets one task pass in each turn of the event loop. A single task passes without waiting."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def enter(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn, loop)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                loop.call_soon(self._turn, loop)
                return
        self._turning = False
