"""Fixtures of the HTTP surface's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.api.scripted import ScriptedWorker
from worker.settings import Settings
from worker.wire.engine_info import EngineInfo

ScriptedFactory = Callable[..., ScriptedWorker]


@pytest.fixture
def scripted() -> Iterator[ScriptedFactory]:
    """Starts HTTP surfaces around scripted supervisors; keyword arguments are settings."""
    with ExitStack() as stack:

        def start(info: EngineInfo | None = None, **settings: Any) -> ScriptedWorker:
            return stack.enter_context(ScriptedWorker(Settings(**settings), info).serve())

        yield start
