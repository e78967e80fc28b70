"""Parses `--override-kv`: values that replace metadata of the model file."""

from __future__ import annotations

import math
import re

Value = int | float | bool | str
FORM = "KEY=TYPE:VALUE, with a TYPE of int, float, bool or str"
_MOST_BYTES = 127
"""The most bytes of a key and of a text; llama.cpp stores each in 128 bytes."""
_ONE = re.compile(r"(?P<key>[^=,\s]+)=(?P<type>int|float|bool|str):(?P<value>.*)", re.DOTALL)
_BETWEEN = re.compile(r",(?=[^=,\s]+=(?:int|float|bool|str):)")


def separated(text: str) -> list[str]:
    """Split overrides that are separated by commas; a value may contain commas, too."""
    return _BETWEEN.split(text)


def parse_override(text: str) -> tuple[str, Value]:
    """Parse a key, in which `{arch}` stands for the model's architecture, and its value.

    Raises `ValueError`, which says what is expected.
    """
    match = _ONE.fullmatch(text)
    if match is None:
        raise ValueError(f"must be {FORM}, not {text!r}")
    key, value = match["key"], match["value"]
    for what in (key, value):
        if len(what.encode()) > _MOST_BYTES or "\0" in what:
            most = f"a key and a value of at most {_MOST_BYTES} bytes each"
            raise ValueError(f"must have {most}, without NUL")
    return key, _value(match["type"], value, text)


def _value(kind: str, value: str, text: str) -> Value:
    if kind == "str":
        return value
    if kind == "bool":
        if value not in ("true", "false"):
            raise ValueError(f"must be true or false after bool:, not {text!r}")
        return value == "true"
    try:
        number = int(value) if kind == "int" else float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or (kind == "int" and not -(1 << 63) <= number < 1 << 63):
        raise ValueError(f"must be a number after {kind}:, not {text!r}")
    return number
