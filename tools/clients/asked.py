"""Requests that several clients share, and how to check for a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel

Refusal = TypeVar("Refusal", bound=Exception)
USER: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
"""A tool in OpenAI's format."""


class City(BaseModel):
    """A city."""

    name: str
    people: int


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: its name
    """
    return f"It is sunny in {city}."


@contextmanager
def refused(kind: type[Refusal], is_right: Callable[[Refusal], bool]) -> Iterator[None]:
    """Passes if the block raises an error of this type with the right message."""
    try:
        yield
    except kind as error:
        assert is_right(error), error
    else:
        raise AssertionError("answered")
