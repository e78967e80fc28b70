"""The engine's loop on llama.cpp and the bundled model, which the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.real_engine import RealEngine


@pytest.fixture(scope="module")
def engine() -> Iterator[RealEngine]:
    engine = RealEngine()
    yield engine
    engine.close()
