"""The thread that parses large bodies and encodes large answers, one at a time, so that the event
loop competes with a single thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from worker.background import background_thread

_T = TypeVar("_T")
_thread = background_thread("off-loop")


async def in_background(work: Callable[[], _T]) -> _T:
    """Run `work` on that thread, and return or raise what it does."""
    return await asyncio.get_running_loop().run_in_executor(_thread, work)
