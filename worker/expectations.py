"""Describes in words what a field accepts, in requests, settings and files that users write.

Only this module, `setting_faults` and `api.http.faults` know pydantic's errors. Pure functions,
any thread.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_NOUNS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "string_unicode": "UTF-8",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
_BRANCHES = {
    "~text": "a text",
    "~list": "a list",
    "~object": "an object",
    "~flag": "true or false",
    "~number": "a number",
    "~ids": "a list of token ids",
    "~mixed": "a list of token ids and texts",
    "~many": "a list of these",
}
"""The branches of unions, by their tags."""


def expectation(error: ErrorDetails) -> str:
    """What the value must be, as a phrase that follows "must be"."""
    limits = error.get("ctx", {})
    match error["type"]:
        case "less_than_equal":
            return f"at most {_plain(limits['le'])}"
        case "greater_than_equal":
            return f"at least {_plain(limits['ge'])}"
        case "greater_than":
            return f"more than {_plain(limits['gt'])}"
        case "string_too_short" | "string_too_long" | "too_short" | "too_long" as kind:
            noun, unit, _ = sized(error["input"])
            side, name = ("least", "min") if kind.endswith("short") else ("most", "max")
            return f"{noun} of at {side} {counted(limits[f'{name}_length'], unit)}"
        case "literal_error":
            expected = str(limits["expected"])
            return f"one of {expected}" if " or " in expected else expected
        case "union_tag_invalid":
            tags = re.findall(r"~\w+", limits["expected_tags"])
            return " or ".join(_BRANCHES[tag] for tag in tags if tag in _BRANCHES)
        case kind:
            return _NOUNS.get(kind) or error["msg"].removeprefix("Input should be ").lower()


def sized(given: object) -> tuple[str, str, str]:
    """A noun for the value, the unit of its length, and the suffix of JSON Schema's keywords."""
    match given:
        case str():
            return "a text", "character", "Length"
        case dict():
            return "an object", "field", "Properties"
    return "a list", "item", "Items"


def _plain(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


def path_of(loc: Iterable[int | str]) -> str:
    """A path like `messages[0].content`, without union branches' tags, which begin with `~`."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("~"):
            path += f".{step}" if path else step
    return path


def closest(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """`; did you mean …?` if the unknown `name` is a misspelling of a candidate, else nothing.
    `prefix` precedes the name in the question."""
    match = next((each for each in candidates if _is_misspelling(name, each)), None)
    return "" if match is None else f"; did you mean {prefix}{match}?"


def _is_misspelling(name: str, known: str) -> bool:
    """Whether the names differ only by one letter in each word, or by what separates the words.

    A name with another word, or with one more or less, means something else, however similar the
    rest is.
    """
    given, right = (re.findall(r"[^\W_]+", each.lower()) for each in (name, known))
    if "".join(given) == "".join(right):
        return True
    return len(given) == len(right) and all(map(_differs_by_a_letter_at_most, given, right))


def _differs_by_a_letter_at_most(given: str, right: str) -> bool:
    """Whether at most one letter is missing, added, replaced, or swapped with the next. Words of
    one or two letters must be equal."""
    n_shared = len(os.path.commonprefix([given, right]))
    a, b = given[n_shared:], right[n_shared:]
    is_swapped = a[:2] == b[1::-1] and a[2:] == b[2:]
    is_slip = a[1:] == b or a == b[1:] or a[1:] == b[1:] or is_swapped
    return given == right or (is_slip and min(len(given), len(right)) > 2)


def counted(n: int, unit: str) -> str:
    return f"{n} {unit}" if n == 1 else f"{n} {unit}s"
