"""The thread beside the event loop. It reads large bodies and encodes large answers, one after the
other, so that the loop competes with one thread only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from worker.background import background_thread

_T = TypeVar("_T")
_thread = background_thread("off-loop")


async def in_background(work: Callable[[], _T]) -> _T:
    """What `work` returns or raises, on that thread."""
    return await asyncio.get_running_loop().run_in_executor(_thread, work)
