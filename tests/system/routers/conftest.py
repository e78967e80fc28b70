"""Three workers, and an environment with the routers from PyPI (`.venv-routers`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ROOT
from tests.conftest import StartWorker
from tests.support.worker import WorkerProcess
from tools.environments import python_with

HERE = Path(__file__).parent
VENV = ROOT / ".venv-routers"
N_WORKERS = 3


@pytest.fixture(scope="session")
def routers_bin() -> Path:
    """The folder of the routers' commands, installed if it is missing or out of date."""
    return python_with(HERE / "requirements.txt", VENV).parent


@pytest.fixture
def workers(start_worker: StartWorker) -> list[WorkerProcess]:
    """Plain workers; the only settings limit their resources, as three share one machine."""
    return [start_worker("--slots", "4") for _ in range(N_WORKERS)]
