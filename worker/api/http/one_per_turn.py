"""Keeps a burst of requests from delaying everything else on the API process's event loop.

Otherwise a thousand requests that arrive together, or hundreds that the engine accepts in one
frame, would all be handled before the loop reads its sockets again, and probes of `/health` would
have to wait.
"""

from __future__ import annotations

import asyncio


class OnePerTurn:
    """Lets one task continue in each turn of the event loop. A task that is alone does not wait."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def turn(self) -> None:
        await self._turn.acquire()
        asyncio.get_running_loop().call_soon(self._turn.release)
