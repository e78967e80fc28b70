"""Reads arguments that are JSON, and gives on strict JSON whatever the model wrote. Any thread.

Arguments are given on as they come: they are read by signs, so a mistake in their structure stays.
What JSON has no sign for becomes the nearest thing: a bare word is a string (`NaN` too), half of a
surrogate pair the replacement character, a line break within a string its escape.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, NoReturn

from worker.api.chat.parse.calls import Deltas, ToolUse
from worker.api.chat.parse.source import Give, Grow, Source, Steps, unwanted

_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("id", "tool_call_id", "type", "index")
_BLANK: Final = re.compile(r"[ \t\r\n]*")
_BETWEEN: Final = re.compile(r"[ \t\r\n,:]+")
_BETWEEN_MEMBERS: Final = re.compile(r"[ \t\r\n,]*")
_WORD: Final = re.compile(r'[^ \t\r\n,:{}\[\]"]*')
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
            word = yield from source.run_of(_WORD)
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


def read_arguments(
    source: Source, deltas: Deltas, name: str, call_id: str | None = None
) -> Steps[bool]:
    """Begin a call with its arguments: an object, a string that holds one, or `null`."""
    yield from source.run_of(_BLANK)
    if (yield from source.peek()) == "{":
        source.forget()
        deltas.call(name, call_id)
        yield from value(source, deltas.arguments, deltas.grow)
        return True
    text = yield from _quoted(source)
    if text is None and (yield from source.run_of(_WORD)) == "null":
        text = ""
    return text is not None and _whole_call(deltas, name, text, call_id)


def _whole_call(deltas: Deltas, name: str, text: str, call_id: str | None = None) -> bool:
    """A call whose arguments have all come; false if they are no object."""
    given = text.strip()
    source, parts = Source("{}" if given in ("", "null") else given, ended=True), list[str]()
    for _ in value(source, parts.append):
        pass
    try:
        is_object = isinstance(from_json("".join(parts)), dict)
    except ValueError:
        return False
    if is_object:
        deltas.call(name, call_id)
        deltas.arguments("".join(parts))
    return is_object


def read_keyed(source: Source, deltas: Deltas, use: ToolUse) -> Steps[bool]:
    """Read the members of `{"NAME": {…}}`."""
    if (yield from _ends(source)) or (key := (yield from _key(source))) is None:
        return False
    name = use.offered(key)
    return name is not None and (yield from _read_rest(source, deltas, name))


def read_named(source: Source, deltas: Deltas, use: ToolUse, *, is_bare: bool) -> Steps[bool]:
    """Read the members of `{"name": …, "arguments": {…}}`, in either order.

    Without a mark before it, an object may be the answer itself: then a member that no call has
    ends the reading, so that the answer is given on at once.
    """
    name: str | None = None
    early = ""
    while not (yield from _ends(source)):
        key = yield from _key(source)
        if key in _ARGUMENTS and name is not None:
            return (yield from _read_rest(source, deltas, name))
        if key in _NAMES and name is None:
            name = use.offered((yield from _quoted(source)) or "")
            if name is None:
                return False
        elif key is None or (is_bare and key not in _OTHERS):
            return False
        else:
            parts: list[str] = []
            if not (yield from value(source, parts.append)):
                return False
            early = "".join(parts) if key in _ARGUMENTS else early
    if early.startswith('"'):
        early = from_json(early)
    return name is not None and _whole_call(deltas, name, early)


def read_exact(source: Source, deltas: Deltas, use: ToolUse) -> Steps[bool]:
    """Read the members of `{"name": …, "arguments": {…}}`, as a grammar has them. What can be no
    function's name ends the reading, so that the answer is given on at once."""
    yield from source.run_of(_BLANK)
    if (yield from _key(source)) != "name":
        return False
    names, written = {to_json(name): name for name in use.parameters}, ""
    while written not in names:
        n_chars = len(written) + 1
        written = yield from source.peek(n_chars)
        if len(written) < n_chars or not any(name.startswith(written) for name in names):
            return False
    source.take(written)
    if (yield from _ends(source)) or (yield from _key(source)) != "arguments":
        return False
    return (yield from source.peek()) == "{" and (
        yield from _read_rest(source, deltas, names[written])
    )


def _read_rest(source: Source, deltas: Deltas, name: str) -> Steps[bool]:
    """Read the arguments and what follows them in the object, which has no meaning."""
    is_call = yield from read_arguments(source, deltas, name)
    while is_call and not (yield from _ends(source)) and (yield from _key(source)) is not None:
        yield from value(source, unwanted)
    return is_call


def _ends(source: Source) -> Steps[bool]:
    """Take what stands between members, and the object's last brace; false if that is not here."""
    yield from source.run_of(_BETWEEN_MEMBERS)
    return (yield from source.takes("}"))


def _key(source: Source) -> Steps[str | None]:
    """Take a key and its colon; `None` if one is not there, or the text ends behind them."""
    key = yield from _quoted(source)
    if key is None:
        return None
    yield from source.run_of(_BLANK)
    if not (yield from source.takes(":")):
        return None
    yield from source.run_of(_BLANK)
    return key if (yield from source.peek()) else None


def _quoted(source: Source) -> Steps[str | None]:
    """The text of the string that begins here; `None` if none does, or it does not end."""
    parts: list[str] = []
    if not ((yield from source.takes('"')) and (yield from _string(source, parts.append))):
        return None
    text: str = from_json(f'"{"".join(parts)}"')
    return text
