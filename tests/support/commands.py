"""Runs the commands of `llorch-cpu` in the test's own process, because a new one takes a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from worker import lifecycle
from worker.commands import doctor, plan
from worker.devices import preflight
from worker.errors import WorkerError
from worker.settings import Settings
from worker.supervisor.engine_process import EngineProcess

DEAF = ("true",)
"""A child that answers none of the doctor's questions about library and device, for tests that need
no answers, which take more than a second."""


def loaded(cache: Path, **settings: Any) -> Settings:
    return Settings.load("cpu", {"port": "0", "cache_dir": str(cache), **settings})


def raised(call: Callable[[], object]) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        call()
    return caught.value


def diagnose(
    cache: Path, child: Sequence[str] = preflight.CHILD, **settings: Any
) -> doctor.Diagnosis:
    return doctor.diagnose(loaded(cache, **settings), child=child)


def plan_refused(cache: Path, **settings: Any) -> WorkerError:
    return raised(lambda: plan.run(loaded(cache, **settings), as_json=False))


def start_refused(cache: Path, **settings: Any) -> WorkerError:
    """Return the refusal by the checks that a start makes before it waits for its engine."""
    return raised(lambda: lifecycle.run(loaded(cache, **settings), EngineProcess(), int))
