"""Three workers, and an environment with the routers from PyPI (`.venv-routers`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.worker import ROOT, WorkerProcess
from tools.environments import python_with

HERE = Path(__file__).parent
VENV = ROOT / ".venv-routers"
N_WORKERS = 3


@pytest.fixture(scope="session")
def routers_bin() -> Path:
    """The folder of the routers' commands; installed when it is missing or out of date."""
    return python_with(HERE / "requirements.txt", VENV).parent


@pytest.fixture
def workers(warm_cache: Path, tmp_path: Path) -> Iterator[list[WorkerProcess]]:
    """Plain ones: nothing is set but what keeps three of them modest on one machine."""
    started: list[WorkerProcess] = []
    try:
        for number in range(N_WORKERS):
            worker = WorkerProcess.start(
                *("--slots", "4", "--threads", "1"),
                folder=tmp_path / f"worker-{number}",
                cache_dir=warm_cache,
            )
            started.append(worker)
        yield started
    finally:
        for worker in started:
            worker.kill()
