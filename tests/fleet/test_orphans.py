"""However a fleet's processes end, no worker is left. Real Ray, as `up` starts it by itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fleet.nodes import free_port
from tests.fleet.running import MARK, PATIENCE_SECONDS, ROOT, Running, file, has_gone

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
WORKERS = 2


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Running]:
    """A fleet on a cluster of this machine that `llorch-ray up` starts itself."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache"),
        MARK: str(tmp_path),
        # The cluster of the other tests has HAProxy on the usual ports.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
    }  # fmt: skip
    environment.pop("RAY_DASHBOARD_ADDRESS", None)
    running = Running(environment, tmp_path, free_port())
    done = running.up(file(WORKERS))
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(running.children()) == WORKERS
        yield running
    finally:
        running.command("down")
        for process in running.processes():
            process.kill()


def named(running: Running, word: str) -> psutil.Process:
    """The one process of the cluster with this word in its command line."""
    (found,) = [
        process
        for process in running.processes()
        if any(word in part for part in (process.info["cmdline"] or [])[:4])
    ]
    return found


@pytest.mark.parametrize("victim", ["ray.scripts.scripts", "raylet/raylet", "gcs_server"])
def test_a_killed_head_leaves_no_worker(alone: Running, victim: str) -> None:
    """The process that `up` started, the head's raylet, and what holds the cluster's state."""
    children = list(alone.children().values())
    process = named(alone, victim)
    began = time.monotonic()
    process.send_signal(signal.SIGKILL)
    assert all(has_gone(child) for child in children)
    print(f"{victim} killed: no worker {time.monotonic() - began:.1f} s later")
    assert alone.command("down").returncode in (0, 1)  # 1: there is no cluster any more
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
