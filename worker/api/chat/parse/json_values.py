"""Reads JSON while it comes, and gives on strict JSON whatever the model wrote. Any thread.

It is read by signs, so a mistake in its structure stays. What JSON has no sign for becomes the
nearest thing: a bare word is a string (`NaN` too), half of a surrogate pair the replacement
character, a line break within a string its escape.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, NoReturn

from worker.api.chat.parse.source import Give, Grow, Source, Steps
from worker.api.chat.request import INPUT

JSON_BLANK: Final = re.compile(r"[ \t\r\n]*")
_BETWEEN: Final = re.compile(r"[ \t\r\n,:]+")
_BETWEEN_MEMBERS: Final = re.compile(r"[ \t\r\n,]*")
WORD: Final = re.compile(r'[^ \t\r\n,:{}\[\]"]*')
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_HIGH: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_HALF: Final = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_PAIR: Final = re.compile(_HIGH.pattern + r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_WHOLE: Final = re.compile(_PAIR.pattern + r'|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt]')
_BEGUN: Final = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")


def to_json(value: Any) -> str:
    """
    Raises:
        ValueError: a number is not finite, or nothing in JSON stands for a value.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def from_json(text: str) -> Any:
    """
    Raises:
        ValueError: this is no JSON; `NaN` and `Infinity` are none.
    """
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse)
        to_json(value)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    return value


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def escaped(text: str) -> str:
    """A text as it stands within a JSON string."""
    return text if _PLAIN.fullmatch(text) else to_json(text)[1:-1]


def value(source: Source, give: Give, grow: Grow | None = None) -> Steps[bool]:
    """Give on one JSON value as it comes; false where the text ends before it does."""
    depth = 0
    while True:
        sign = yield from source.peek()
        if sign == '"':
            give(source.take(sign))
            if not (yield from _string(source, give, grow)):
                return False
            give('"')
        elif sign and sign in "{[}]":
            depth += 1 if sign in "{[" else -1
            give(source.take(sign))
        elif found := _BETWEEN.match(source.text, source.at):
            give(source.take_to(found.end()))
        else:
            word = yield from source.run_of(WORD)
            if source.at == len(source.text):  # cut off
                give(word)
                return False
            give(strict_word(word))
        if depth <= 0:
            return True


def _string(source: Source, give: Give, grow: Grow | None = None) -> Steps[bool]:
    """Give on the rest of a string, without its end quote, which is taken."""
    flow = (_PLAIN, grow) if grow is not None else None
    while True:
        source.flow = flow
        sign = yield from source.peek()
        source.flow = None
        if not sign:
            return False
        if found := _PLAIN.match(source.text, source.at):
            give(source.take_to(found.end()))
        elif sign == "\\":
            yield from _escape(source, give)
        else:
            source.take(sign)
            if sign == '"':
                return True
            give(escaped(sign))


def _escape(source: Source, give: Give) -> Steps[None]:
    text = yield from source.peek(2)
    if text == "\\u":
        text = yield from source.peek(6)
        if _HIGH.fullmatch(text) and (yield from source.peek(8))[6:] == "\\u":
            pair = yield from source.peek(12)
            text = pair if _PAIR.fullmatch(pair) else text
    if _WHOLE.fullmatch(text) or (source.ended and _BEGUN.fullmatch(text)):
        source.take(text)
        give("\ufffd" if _HALF.fullmatch(text) else text)
    else:
        source.take_to(source.at + 1)
        give("\\\\")


def strict_word(word: str) -> str:
    """A word without quotes as JSON: a number, JSON's or Python's own word, or else a string."""
    is_number = _NUMBER.fullmatch(word) is not None and math.isfinite(float(word))
    if is_number or word in PYTHON_WORDS.values():
        return word
    return PYTHON_WORDS.get(word) or to_json(word)


def read_input(source: Source, give: Give) -> Steps[None]:
    """Give on the text of the member `INPUT` of an object as it comes, or another value of it as
    JSON. Where the object has none, it is given on itself."""
    found: str | None = None
    source.remember()
    is_read = yield from source.takes("{")
    while is_read and not (yield from takes_end(source)):
        key = yield from read_key(source)
        if key == INPUT and (yield from source.takes('"')):
            source.forget()
            yield from _string(source, lambda part: give(_unescaped(part)))
            found, is_read = "", False
        elif key is None:
            is_read = False
        else:
            parts: list[str] = []
            yield from value(source, parts.append)
            found = "".join(parts) if key == INPUT else found
    taken = source.forget()
    give(taken if found is None else found)
    while True:  # of strict JSON nothing follows
        rest = source.take_to(len(source.text))
        if found is None:
            give(rest)
        yield


def _unescaped(part: str) -> str:
    """A part of a string, of which no escape is cut, as text."""
    text: str = from_json(f'"{part}"') if "\\" in part else part
    return text


def takes_end(source: Source) -> Steps[bool]:
    """Take what stands between members, and the object's last brace; false if that is not here."""
    yield from source.run_of(_BETWEEN_MEMBERS)
    return (yield from source.takes("}"))


def read_key(source: Source) -> Steps[str | None]:
    """Take a key and its colon; `None` if one is not there, or the text ends behind them."""
    key = yield from read_quoted(source)
    if key is None:
        return None
    yield from source.run_of(JSON_BLANK)
    if not (yield from source.takes(":")):
        return None
    yield from source.run_of(JSON_BLANK)
    return key if (yield from source.peek()) else None


def read_quoted(source: Source) -> Steps[str | None]:
    """The text of the string that begins here; `None` if none does, or it does not end."""
    parts: list[str] = []
    if not ((yield from source.takes('"')) and (yield from _string(source, parts.append))):
        return None
    text: str = from_json(f'"{"".join(parts)}"')
    return text
