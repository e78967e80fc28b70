"""What the tests of a fleet share: asyncio by anyio's plug-in for pytest, and a fleet that runs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.fleet.running import PATIENCE_SECONDS, Running, cluster, file


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Ray's nodes with a fleet on them; nothing of either is left afterwards."""
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
