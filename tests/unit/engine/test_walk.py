"""The path of a sampled token: how many of our functions a decoding step calls in the engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

import worker
from tests.support.real_engine import RealEngine

OURS = Path(next(iter(worker.__path__)))
ENGINE_ROOMS = ("engine", "llama", "wire")
MOST_FUNCTIONS = 21


@pytest.fixture
def engine() -> Iterator[RealEngine]:
    engine = RealEngine(slots=2)
    yield engine
    engine.close()


def functions_of_a_turn(engine: RealEngine) -> list[str]:
    """Return the functions of the engine's rooms that one step of its loop calls, in order."""
    called: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and OURS in path.parents:
            name = str(path.relative_to(OURS).with_suffix(""))
            if name.startswith(ENGINE_ROOMS):
                called[f"{name}: {frame.f_code.co_qualname}"] = None

    sys.setprofile(note)
    try:
        engine.loop.turn()
    finally:
        sys.setprofile(None)
    return [each for each in called if "<listcomp>" not in each]


def test_a_drawn_token_takes_few_functions(engine: RealEngine) -> None:
    engine.generate("Once upon a time", max_tokens=24)  # by then the texts of its tokens are cached
    request_id = engine.submit("Once upon a time", max_tokens=24)
    while len(engine.text(request_id)) < 9:  # past the first rows of the slot
        engine.turn()
    functions = functions_of_a_turn(engine)
    engine.run()
    assert "engine/loop: Loop.step" in functions
    assert len(functions) <= MOST_FUNCTIONS, "\n".join(functions)
