"""`llorch-cpu` whose event loop writes down how long it is held.

A timer is due every few milliseconds. What it comes too late is a hold: a line of milliseconds in
the file that `LOOP_HOLDS` names. Time in which the process did not compute is left out, because
then the machine held it up. A native call on another thread that keeps the GIL counts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine
from typing import Any

PERIOD_SECONDS = 0.002
SHORTEST_MS = 5.0
"""A hold that is written down; shorter ones are many."""


async def write_down(path: str) -> None:
    with open(path, "a", buffering=1) as file:
        while True:
            wall, computed = time.perf_counter(), time.process_time()
            await asyncio.sleep(PERIOD_SECONDS)
            late = time.perf_counter() - wall - PERIOD_SECONDS
            held_ms = 1000 * min(late, time.process_time() - computed)
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
