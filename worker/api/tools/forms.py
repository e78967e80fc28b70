"""The forms that a written call can have, as data. Any thread."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JsonCall:
    """`{"name": …, "arguments": {…}}`, alone or in a list."""

    names: tuple[str, ...] = ("name", "tool_name", "function")
    arguments: tuple[str, ...] = ("arguments", "parameters")
    name_is_key: bool = False
    """`{"the name": {its arguments}}` instead."""


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A header with the name, then the arguments as JSON."""

    header: re.Pattern[str]
    """With a group `name`, and `id` where the model gives the call one."""
    begins: str = ""
    """The text that the header begins with; without one, the name itself."""


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """The name in one tag, and each argument in one of its own."""

    header: re.Pattern[str]
    """With a group `name`."""
    argument: re.Pattern[str]
    """With a group `key`, and `type` where the tag says whether it is a string."""
    argument_end: tuple[str, ...]
    end: tuple[str, ...]
    begins: str = ""
    nested: str = ""
    """The mark before tags within an argument, where lists and objects are written so."""


@dataclass(frozen=True, slots=True)
class LiteralCall:
    """A name and its arguments in a notation of their own, read when it is whole."""

    notation: str
    """`gemma` (`call:name{key:<|"|>text<|"|>}`) or `python` (`[name(key="text")]`)."""
    end: str


Form = JsonCall | NamedCall | TaggedCall | LiteralCall
