"""What an answer grows by: the closed set of its deltas, the same for all dialects. Pure data.

A parser makes the first four of a model's text; a dialect turns each into bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple


class Text(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class Call(NamedTuple):
    """The beginning of a call. Its arguments follow as parts of a JSON text."""

    call: int
    """Its index in the message."""
    id: str
    name: str


class Arguments(NamedTuple):
    call: int
    """The index of the call that they belong to."""
    text: str


Delta = Text | Reasoning | Call | Arguments


class Parser(ABC):
    """Splits a model's text into deltas; what it cannot read stays text."""

    def feed(self, text: str) -> list[Delta]:
        """Take more output; returns the deltas that are certain by now."""
        return self.run(text, final=False)

    def finish(self) -> list[Delta]:
        """The deltas that were held back until the end."""
        return self.run("", final=True)

    @abstractmethod
    def run(self, text: str, *, final: bool) -> list[Delta]:
        """Take more output, or with `final` the end of it."""
