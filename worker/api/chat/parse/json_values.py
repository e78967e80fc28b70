"""Reads JSON as it arrives, and passes on strict JSON, whatever the model wrote. Any thread.

It reads token by token, so a mistake in the structure stays. A token that JSON does not have
becomes the nearest one: a bare word a string (`NaN` too), half of a surrogate pair the replacement
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
_ESCAPE: Final = re.compile(_PAIR.pattern + r'|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt]')
_CUT_ESCAPE: Final = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")


def to_json(value: Any) -> str:
    """
    Raises:
        ValueError: a number is not finite, or a value has no form in JSON.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def from_json(text: str) -> Any:
    """
    Raises:
        ValueError: the text is not JSON; `NaN` and `Infinity` are not, either.
    """
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse)
        to_json(value)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    return value


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def escaped(text: str) -> str:
    """A text as the content of a JSON string, between its quotes."""
    return text if _PLAIN.fullmatch(text) else to_json(text)[1:-1]


def value(source: Source, give: Give, grow: Grow | None = None) -> Steps[bool]:
    """Pass on one JSON value as it arrives; false if the text ends within it."""
    depth = 0
    while True:
        char = yield from source.peek()
        if char == '"':
            give(source.take(char))
            if not (yield from _string(source, give, grow)):
                return False
            give('"')
        elif char and char in "{[}]":
            depth += 1 if char in "{[" else -1
            give(source.take(char))
        elif found := _BETWEEN.match(source.text, source.at):
            give(source.take_to(found.end()))
        else:
            word = yield from source.run_of(WORD)
            if source.at == len(source.text):  # cut off
                give(_cut_word(word))
                return False
            give(strict_word(word))
        if depth <= 0:
            return True


def _string(source: Source, give: Give, grow: Grow | None = None) -> Steps[bool]:
    """Pass on the rest of a string, and take its end quote; false if the text ends before it."""
    flow = (_PLAIN, grow) if grow is not None else None
    while True:
        source.flow = flow
        char = yield from source.peek()
        source.flow = None
        if not char:
            return False
        if found := _PLAIN.match(source.text, source.at):
            give(source.take_to(found.end()))
        elif char == "\\":
            yield from _escape(source, give)
        else:
            source.take(char)
            if char == '"':
                return True
            give(escaped(char))


def _escape(source: Source, give: Give) -> Steps[None]:
    text = yield from source.peek(2)
    if text == "\\u":
        text = yield from source.peek(6)
        if _HIGH.fullmatch(text) and (yield from source.peek(8))[6:] == "\\u":
            pair = yield from source.peek(12)
            text = pair if _PAIR.fullmatch(pair) else text
    if _ESCAPE.fullmatch(text) or (source.ended and _CUT_ESCAPE.fullmatch(text)):
        source.take(text)
        give("\ufffd" if _HALF.fullmatch(text) else text)
    else:
        source.take_to(source.at + 1)
        give("\\\\")


def strict_word(word: str) -> str:
    """A bare word as JSON: a number, a word of JSON or Python, or else a string."""
    is_number = _NUMBER.fullmatch(word) is not None and math.isfinite(float(word))
    if is_number or word in PYTHON_WORDS.values():
        return word
    return PYTHON_WORDS.get(word) or to_json(word)


def _cut_word(word: str) -> str:
    """The beginning of a bare word as the beginning of a value: a string's, if no other fits."""
    is_number = any(map(_NUMBER.fullmatch, (word, word + "0")))
    is_begun = is_number or any(each.startswith(word) for each in PYTHON_WORDS.values())
    return word if is_begun else to_json(word)[:-1]


def read_input(source: Source, give: Give) -> Steps[None]:
    """Pass on the text of an object's member `INPUT` as it arrives, or as JSON if it is not a
    string. Without that member, pass on the object itself."""
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
    while True:  # nothing follows strict JSON
        rest = source.take_to(len(source.text))
        if found is None:
            give(rest)
        yield


def _unescaped(part: str) -> str:
    """The text of a part of a JSON string in which no escape is cut."""
    text: str = from_json(f'"{part}"') if "\\" in part else part
    return text


def takes_end(source: Source) -> Steps[bool]:
    """Take separators of members, and the object's last brace; false if that is not here."""
    yield from source.run_of(_BETWEEN_MEMBERS)
    return (yield from source.takes("}"))


def read_key(source: Source) -> Steps[str | None]:
    """Take a key and its colon; `None` if one is missing, or the text ends after them."""
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
