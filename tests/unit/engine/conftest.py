"""The engine's loop on llama.cpp and the bundled model, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.real_engine import RealEngine


@pytest.fixture(autouse=True)
def closes_its_engines() -> Iterator[None]:
    before = set(RealEngine.running)
    yield
    for engine in RealEngine.running - before:
        engine.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[RealEngine]:
    engine = RealEngine()
    yield engine
    engine.close()
