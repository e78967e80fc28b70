"""No worker is left, however a fleet's processes end. Uses the Ray that `up` starts."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

from tests.system.fleet.running import PATIENCE_SECONDS, Running, has_gone

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def named(running: Running, word: str) -> psutil.Process:
    """Return the cluster's only process with this word in its command line."""
    (found,) = [
        process
        for process in running.processes()
        if any(word in part for part in (process.info["cmdline"] or [])[:4])
    ]
    return found


@pytest.mark.parametrize("victim", ["ray.scripts.scripts", "raylet/raylet", "gcs_server"])
def test_a_killed_head_leaves_no_worker(alone: Running, victim: str) -> None:
    """The process that `up` started, the head's raylet, and the process with the cluster's
    state."""
    children = list(alone.children().values())
    process = named(alone, victim)
    began = time.monotonic()
    process.send_signal(signal.SIGKILL)
    assert all(has_gone(child) for child in children)
    print(f"{victim} killed: no worker {time.monotonic() - began:.1f} s later")
    assert alone.command("down").returncode in (0, 1)  # 1: there is no longer a cluster
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := alone.processes():
        assert time.monotonic() < deadline, [process.info["cmdline"] for process in left]
        time.sleep(0.5)


def test_a_killed_owner_takes_its_worker_with_it(alone: Running) -> None:
    for id, child in alone.children().items():
        began = time.monotonic()
        alone.actor(id).send_signal(signal.SIGKILL)
        assert has_gone(child, seconds=30)
        print(f"actor killed: its worker has gone {1000 * (time.monotonic() - began):.0f} ms later")
