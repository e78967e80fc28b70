"""What keeps a burst from delaying everything else on the API process's event loop.

A thousand requests that arrive together, or hundreds that the engine accepts in one frame, would
otherwise all be parsed, logged and answered before the loop looks at its sockets again: probes of
`/health` would wait 20 to 60 ms for that.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Lets one task a turn go on. One that is alone passes without waiting."""

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
