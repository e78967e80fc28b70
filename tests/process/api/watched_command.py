"""`llorch-cpu` whose event loop records for how long it is blocked.

A timer is due every few milliseconds. Its delay is a hold, which is written as a line of
milliseconds to the file that `LOOP_HOLDS` names.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any

from tests.support.clock import HoldClock

PERIOD_SECONDS = 0.002
SHORTEST_MS = 5.0
"""Minimum length of a recorded hold; shorter ones are too many."""


async def write_down(path: str) -> None:
    held = HoldClock()
    with open(path, "a", buffering=1) as file:
        while True:
            held.lap()
            await asyncio.sleep(PERIOD_SECONDS)
            held_ms = 1000 * held.lap(PERIOD_SECONDS)
            if held_ms >= SHORTEST_MS:
                file.write(f"{held_ms:.1f}\n")


_run = asyncio.Runner.run


def run_watched(runner: asyncio.Runner, coro: Coroutine[Any, Any, Any], **options: Any) -> Any:
    async def watched() -> Any:
        watch = asyncio.create_task(write_down(os.environ["LOOP_HOLDS"]))
        try:
            return await coro
        finally:
            watch.cancel()

    return _run(runner, watched(), **options)


if __name__ == "__main__":
    asyncio.Runner.run = run_watched  # type: ignore[assignment]
    from worker.cli import cpu

    cpu()
