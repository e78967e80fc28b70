"""A real fleet: Ray's nodes, Serve, HAProxy and the bundled model, hurt and measured.

`make fleet-test` runs this. Each test prints its figures; what is asserted holds on a busy machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet.load import counted, crowd
from tests.fleet.running import PATIENCE_SECONDS, ROUNDS, Running, cluster, has

pytestmark = [pytest.mark.long, pytest.mark.anyio]
FLEET = """
[[workers]]
name = "tiny"
device = "llorch_device"
replicas = {replicas}

[workers.settings]
threads = 1
slots = {slots}
max_queued_requests = {queue}
drain_timeout = 20
page = false
"""
CLIENTS = 8


def file(replicas: int = 3, slots: int = 4, queue: int = 256) -> str:
    return FLEET.format(replicas=replicas, slots=slots, queue=queue)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with cluster(tmp_path_factory.mktemp("fleet")) as running:
        done = running.up(file())
        assert done.returncode == 0, done.stdout + done.stderr
        yield running
        children = running.children()
        assert running.command("down").returncode == 0
        assert not any(process.is_running() for process in children.values())
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := running.processes():
        assert time.monotonic() < deadline, left
        time.sleep(0.5)
    print("leaks: 0 processes of workers, raylets and HAProxy left")


async def restored(running: Running, replicas: int = 3, **settings: int) -> None:
    """The fleet as the file says, whatever a test before left."""
    done = await asyncio.to_thread(running.up, file(replicas, **settings))
    assert done.returncode == 0, done.stdout + done.stderr
    await running.until(has(replicas))


# --- faults ------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["child", "actor"])
async def test_a_death_costs_at_most_the_victims_streams(running: Running, victim: str) -> None:
    await restored(running)
    seconds, n_streams = [], 0
    async with crowd(running.uri, CLIENTS, max_tokens=400) as outcomes:
        for _ in range(ROUNDS):
            busy: list[dict[str, Any]] = []
            while not busy:
                await asyncio.sleep(0.3)
                busy = [each for each in await running.workers() if each["running"]]
            worker = max(busy, key=lambda each: each["running"])
            n_streams += worker["running"] + 1  # one may have come since
            process = running.children()[worker["id"]]
            (process if victim == "child" else running.actor(worker["id"])).kill()
            await running.until(lambda workers, id=worker["id"]: all(  # type: ignore[misc]
                each["id"] != id for each in workers))  # fmt: skip
            seconds.append(await running.until(has(3)))
    counts = counted(outcomes)
    print(f"{victim} killed {ROUNDS} times: {counts}, whole again after "
          f"{', '.join(f'{each:.1f}' for each in seconds)} s")  # fmt: skip
    assert counts["cut"] == counts["lost"] == 0
    assert counts["error"] <= n_streams
    assert counts["ok"] > 0
