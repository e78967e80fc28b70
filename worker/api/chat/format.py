"""The forms that an answer can be asked to have, whatever dialect asks.

Each has the path of the request's field that it comes from, for faults. Pure data, any thread.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that is valid under a schema."""

    schema: object
    path: str
    strict: bool = False
    """Whether a schema that cannot be enforced whole is refused."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A text that the regular expression matches as a whole."""

    pattern: str
    path: str


@dataclass(frozen=True, slots=True)
class Choices:
    """One of the texts."""

    texts: tuple[str, ...]
    path: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """A text that follows a grammar: GBNF as llama.cpp reads it, or Lark as llguidance does."""

    text: str
    path: str


Format = JsonSchema | Expression | Choices | Grammar
