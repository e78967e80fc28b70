"""The number of workers follows the load; and a roll with a spare device. Real Ray."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.system.fleet.load import counted, crowd
from tests.system.fleet.running import Running, file, has

pytestmark = [pytest.mark.long, pytest.mark.anyio, pytest.mark.timeout(900)]
HOLD_SECONDS = 60.0
"""Seconds for which the number must not change under constant load."""
SCALING = """
[workers.scaling]
up_delay = 1
down_delay = 10
"""


async def counts_for(running: Running, seconds: float) -> set[int]:
    """Return all numbers of workers that were observed."""
    seen, end = set(), time.monotonic() + seconds
    while time.monotonic() < end:
        seen.add(len(await running.workers()))
        await asyncio.sleep(0.5)
    return seen


async def test_the_load_adds_workers_and_takes_them_away(running: Running) -> None:
    await running.restored(1)
    done = await asyncio.to_thread(running.up, file("[1, 3]", more=SCALING))
    assert done.returncode == 0, done.stdout + done.stderr
    # 8 requests over 0.8 × 4 slots are 2.5 workers, 2 are less than one.
    async with crowd(running.uri, 2, max_tokens=300) as few:
        async with crowd(running.uri, 6, max_tokens=300) as many:
            up = await running.until(has(3))
            held_up = await counts_for(running, HOLD_SECONDS)
        down = await running.until(has(1))
        held_down = await counts_for(running, HOLD_SECONDS)
    print(f"autoscaling: 1→3 in {up:.1f} s, 3→1 in {down:.1f} s with a delay of 10 s, "
          f"{counted(few + many)}; in the {HOLD_SECONDS:.0f} s after each the numbers were "
          f"{held_up} and {held_down}")  # fmt: skip
    assert {outcome.kind for outcome in few + many} == {"ok"}
    assert held_up == {3} and held_down == {1}


async def test_scale_fixes_the_number_and_up_gives_it_back_to_the_load(running: Running) -> None:
    done = await asyncio.to_thread(running.up, file("[1, 3]", more=SCALING))
    assert done.returncode == 0, done.stderr
    done = await asyncio.to_thread(running.command, "scale", "2")
    assert done.returncode == 0, done.stderr
    await running.until(has(2))
    assert await counts_for(running, 20) == {2}
    done = await asyncio.to_thread(running.up, file("[1, 3]", more=SCALING))
    assert done.returncode == 0, done.stderr
    await running.until(has(1))


async def test_a_roll_of_one_worker_with_one_to_spare_is_never_without(running: Running) -> None:
    await running.restored(1, surge=True)
    (before,) = await running.workers()
    seen: set[int] = set()
    async with crowd(running.uri, 4, max_tokens=100) as outcomes:
        rolling = asyncio.create_task(asyncio.to_thread(running.command, "roll", "tiny"))
        while not rolling.done():
            seen |= await counts_for(running, 1)
        done = await rolling
    print(f"roll of one worker with surge: {counted(outcomes)}, workers seen {seen}")
    assert done.returncode == 0, done.stderr
    assert 0 not in seen
    await running.until(has(1))
    (after,) = await running.workers()
    assert after["id"] != before["id"]
    assert {outcome.kind for outcome in outcomes} == {"ok"}
