"""Reads calls with JSON arguments, in an object with the name or after a header. Any thread."""

from __future__ import annotations

import json
import re

from worker.api.chat.parse.calls import Calls, Progress, header_of
from worker.api.chat.parse.forms import JsonCall, NamedCall

_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BLANKS = re.compile(r"[\s,]*")
_SIGNS = re.compile(r'["\\{}\[\]]')
_SCALAR_END = re.compile(r"[\s,}\]]")


class JsonValue:
    """Finds the end of a JSON value in a growing text, without checking that it is valid."""

    def __init__(self, start: int) -> None:
        self.start = self._at = start
        self._depth = 0
        self._in_string = self._is_escaped = False

    def end(self, text: str) -> int | None:
        """The index after the value; `None` until it is known."""
        if text[self.start : self.start + 1] not in ("{", "[", '"'):
            found = _SCALAR_END.search(text, self.start)
            return found.start() if found else None
        while self._at < len(text):
            if self._is_escaped:
                self._is_escaped, self._at = False, self._at + 1
                continue
            found = _SIGNS.search(text, self._at)
            if found is None:
                self._at = len(text)
                return None
            self._at = found.end()
            self._take(found[0])
            if not self._depth and not self._in_string and not self._is_escaped:
                return self._at
        return None

    def _take(self, sign: str) -> None:
        if self._in_string:
            self._is_escaped = sign == "\\"
            self._in_string = sign != '"'
        elif sign == '"':
            self._in_string = True
        elif sign in "{[":
            self._depth += 1
        elif sign in "}]":
            self._depth -= 1


class _Arguments:
    """Streams the arguments' value as it comes. A string that holds JSON is sent as a whole."""

    def __init__(self, start: int) -> None:
        self._value, self._sent = JsonValue(start), start

    def advance(self, text: str, calls: Calls) -> int | None:
        end = self._value.end(text)
        if text[self._value.start] == '"':
            if end is not None:
                calls.arguments(_decoded(text[self._value.start : end]) or "{}")
            return end
        until = len(text) if end is None else end
        raw = text[self._sent : until]
        if end is not None and text[self._value.start : end] == "null":
            raw = "{}"
        elif end is None and text[self._value.start] not in "{[":
            return None  # a scalar may turn out to be `null`
        calls.arguments(raw)
        self._sent = until
        return end


class ObjectReader:
    """Reads `{"name": …, "arguments": {…}}`, with its members in any order."""

    def __init__(self, form: JsonCall, calls: Calls) -> None:
        self._form, self._calls = form, calls
        self.held, self.started = "", False
        self._at = 1  # after the brace
        self._key: str | None = None
        self._name: str | None = None
        self._value: JsonValue | None = None
        self._arguments: _Arguments | None = None
        self._early: str | None = None
        """Arguments that precede the name."""

    def advance(self, text: str, *, final: bool) -> Progress:
        self.held += text
        while (progress := self._step()) is None:
            pass
        if progress == "failed" and self.started:  # ignore what follows the arguments
            self.held = self.held[self._at :]
            return "done"
        if progress == "more" and final and not self.started:
            if self._name is not None and not self._form.name_is_key:
                self._start()  # cut off after the name
                return "more"
            return "failed"
        return progress

    def _step(self) -> Progress | None:
        """Advance by one step; `None` if the next step may follow at once."""
        if self._arguments is not None:
            end = self._arguments.advance(self.held, self._calls)
            if end is None:
                return "more"
            self._arguments, self._key, self._at = None, None, end
        elif self._value is not None:
            end = self._value.end(self.held)
            if end is None:
                return "more"
            raw, self._value, self._at = self.held[self._value.start : end], None, end
            return self._member(raw)
        elif self._key is not None:
            return self._begin_value()
        else:
            return self._next_key()
        return None

    def _next_key(self) -> Progress | None:
        self._at = _end_of(_BLANKS, self.held, self._at)
        sign = self.held[self._at : self._at + 1]
        if sign == "}":
            return self._close()
        if sign != '"':
            return "failed" if sign else "more"
        found = _STRING.match(self.held, self._at)
        if found is None:
            return "more"
        self._key, self._at = _decoded(found[0]), found.end()
        return None if self._key is not None else "failed"

    def _begin_value(self) -> Progress | None:
        place = _end_of(re.compile(r"\s*"), self.held, self._at)
        if self.held[place : place + 1] != ":":
            return "failed" if place < len(self.held) else "more"
        place = _end_of(re.compile(r"\s*"), self.held, place + 1)
        if place == len(self.held):
            return "more"
        assert self._key is not None
        begins = self._key in _ARGUMENTS and self._name is not None and not self.started
        if self._form.name_is_key and self._name is None:
            if not self._calls.is_offered(self._key):
                return "failed"
            self._name, begins = self._key, True
        if begins:
            self._start()
            self._arguments = _Arguments(place)
        else:
            self._value = JsonValue(place)
        return None

    def _member(self, raw: str) -> Progress | None:
        key, self._key = self._key, None
        if key in _NAMES and self._name is None:
            name = _decoded(raw) if raw.startswith('"') else None
            if name is None or not self._calls.is_offered(name):
                return "failed"
            self._name = name
        elif key in _ARGUMENTS and self._early is None:
            self._early = raw
        return None

    def _close(self) -> Progress:
        if self._name is None:
            return "failed"
        if not self.started:
            self._start()
            raw = self._early or "{}"
            text = _decoded(raw) if raw.startswith('"') else raw
            self._calls.arguments("{}" if text in (None, "", "null") else str(text))
        self.held = self.held[self._at + 1 :]
        return "done"

    def _start(self) -> None:
        assert self._name is not None
        self.started = True
        self._calls.start(self._name)


class NamedReader:
    """Reads a header with the name, followed by one JSON value."""

    def __init__(self, form: NamedCall, calls: Calls) -> None:
        self._form, self._calls = form, calls
        self.held, self.started = "", False
        self._arguments: _Arguments | None = None

    def advance(self, text: str, *, final: bool) -> Progress:
        self.held += text
        if not self.started:
            found = header_of(self.held, self._form.header, self._calls, final=final)
            if isinstance(found, str):
                return found
            self._calls.start(found["name"].strip(), found.groupdict().get("id"))
            self.started, self.held = True, self.held[found.end() :]
        if self._arguments is None:
            self.held = self.held.lstrip()
            if not self.held:
                return "more"
            if self.held[0] not in "{[":
                self._calls.arguments("{}")
                return "done"
            self._arguments = _Arguments(0)
        end = self._arguments.advance(self.held, self._calls)
        if end is None:
            return "more"
        self.held = self.held[end:]
        return "done"


def _end_of(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    return found.end() if found is not None else place


def _decoded(text: str) -> str | None:
    """The text of a JSON string, control characters allowed; `None` if it is no string."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
