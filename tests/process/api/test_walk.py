"""The functions and objects of one streamed chat in the API process: limits that may be lowered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tools.walk import Walk, walk

FUNCTIONS_IN = 86
OBJECTS_IN = 15
FUNCTIONS_OUT = 13
OBJECTS_OUT = 1


def test_a_streamed_chat_takes_few_functions_and_objects(script: Callable[..., None]) -> None:
    found: Walk = asyncio.run(walk())
    assert len(found.functions_in) <= FUNCTIONS_IN
    assert found.objects_in.total() <= OBJECTS_IN
    assert len(found.functions_out) <= FUNCTIONS_OUT
    assert found.objects_out.total() <= OBJECTS_OUT


def test_a_streamed_chat_runs_code_of_its_own_dialect_only(script: Callable[..., None]) -> None:
    """A dialect's folder is left once and entered once on each way."""
    found = asyncio.run(walk())
    for functions in (found.functions_in, found.functions_out):
        dialects = {name.split("/")[2] for name in functions if name.startswith("api/dialects/")}
        assert dialects == {"openai"}
