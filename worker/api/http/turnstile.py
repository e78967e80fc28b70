"""Keeps a burst of requests from delaying everything else on the API process's event loop.

Otherwise a thousand requests that arrive together, or hundreds that the engine accepts in one
frame, would all be handled before the loop reads its sockets again. Probes of `/health` would have
to wait.
"""

from __future__ import annotations

import asyncio


class Turnstile:
    """Lets one task pass in a turn of the event loop. A single task passes without waiting."""

    def __init__(self) -> None:
        self._passage = asyncio.Lock()

    async def enter(self) -> None:
        await self._passage.acquire()
        asyncio.get_running_loop().call_soon(self._passage.release)
