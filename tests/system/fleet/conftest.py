"""Fixtures for tests of a fleet: a running fleet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.fleet.running import PATIENCE_SECONDS, Running, cluster, file, on_this_machine


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Ray's nodes with a fleet on them; both are removed completely afterwards."""
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
    print("leaks: 0 processes of workers and raylets left")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Running]:
    """A fleet on a cluster of this machine that `llorch-ray up` starts itself."""
    with on_this_machine(tmp_path, file(2)) as running:
        assert len(running.children()) == 2
        yield running
