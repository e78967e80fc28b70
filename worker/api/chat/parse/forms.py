"""The forms of a written call, as data. Any thread."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JsonCall:
    """`{"name": …, "arguments": {…}}`, alone or in a list."""

    name_is_key: bool = False
    """Whether the form is `{"the name": {its arguments}}` instead."""


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A header with the name, followed by the arguments as JSON."""

    header: re.Pattern[str]
    """Matches the header; its group `name` is the function, `id` the call's id if it has one."""
    begins: str = ""
    """The text that the header begins with; empty if it begins with the name itself."""


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """A tag with the name, and a tag for each argument."""

    header: re.Pattern[str]
    """Matches the tag with the name; its group `name` is the function."""
    argument: re.Pattern[str]
    """Matches an argument's tag; its group `key` is the name, `type` tells a string."""
    argument_end: tuple[str, ...]
    end: tuple[str, ...]
    begins: str = ""
    nested: str = ""
    """The mark before tags within an argument, where lists and objects are written so."""


@dataclass(frozen=True, slots=True)
class LiteralCall:
    """A name and arguments in a notation that is read only as a whole."""

    notation: str
    """`gemma` (`call:name{key:<|"|>text<|"|>}`) or `python` (`[name(key="text")]`)."""
    end: str


Form = JsonCall | NamedCall | TaggedCall | LiteralCall
