"""Reads calls whose arguments are text in tags of their own. Any thread.

Only the function's schema tells a number from a text that looks like one. A parameter that can only
be a string is streamed as one. The value of any other parameter is JSON if it can be read as JSON.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from worker.api.chat.parse.calls import MAX_HEADER_CHARS, Calls, Progress, begun_mark, header_of
from worker.api.chat.parse.forms import TaggedCall
from worker.api.chat.parse.nested_values import end_of, value_of

_PYTHON = {"True": "true", "False": "false", "None": "null"}
_MAX_PYTHON_CHARS = 20_000
_CDATA_BEGIN = "<![CDATA["
_CDATA = re.compile(r"<!\[CDATA\[(.*)\]\]>", re.DOTALL)


class TaggedReader:
    def __init__(self, form: TaggedCall, calls: Calls) -> None:
        self._form, self._calls = form, calls
        self.held, self.started = "", False
        self._parameters: Mapping[str, Any] = {}
        self._n_arguments = 0
        self._value: _Value | _NestedValue | None = None

    def advance(self, text: str, *, final: bool) -> Progress:
        self.held += text
        if not self.started:
            found = header_of(self.held, self._form.header, self._calls, final=final)
            if isinstance(found, str):
                return found
            self.started, self.held = True, self.held[found.end() :]
            name = found["name"].strip()
            self._parameters = self._calls.parameters(name)
            self._calls.start(name)
        while (progress := self._step(final)) is None:
            pass
        return progress

    def _step(self, final: bool) -> Progress | None:
        if self._value is not None:
            rest = self._value.advance(self.held, self._calls, final)
            if rest is None:
                self.held = ""
                return "more"
            self.held, self._value = rest, None
            return None
        self.held = self.held.lstrip()
        for end in self._form.end:
            if self.held.startswith(end):
                self._close()
                self.held = self.held[len(end) :]
                return "done"
        found = self._form.argument.search(self.held[: 2 * MAX_HEADER_CHARS])
        place = min((p for e in self._form.end if (p := self.held.find(e)) >= 0), default=-1)
        if found is None or 0 <= place < found.start():
            if place >= 0:  # anything else before the end is ignored
                self.held = self.held[place:]
                return None
            if len(self.held) > MAX_HEADER_CHARS:
                self._close()
                return "done"
            return "more"
        self._argument(found)
        return None

    def _argument(self, found: re.Match[str]) -> None:
        key = found["key"].strip()
        self._calls.arguments("{" if not self._n_arguments else ", ")
        self._n_arguments += 1
        self._calls.arguments(json.dumps(key, ensure_ascii=False) + ": ")
        kind = found["type"] if "type" in self._form.argument.groupindex else None
        schema = self._parameters.get(key)
        if self._form.nested and not _is_text(schema, kind):
            self._value = _NestedValue(self._form.nested, key, schema)
        else:
            ends = tuple(end.replace("{key}", key) for end in self._form.argument_end)
            self._value = _Value(ends, _is_text(schema, kind))
        self.held = self.held[found.end() :]

    def _close(self) -> None:
        self._calls.arguments("}" if self._n_arguments else "{}")


class _Value:
    """One argument's text up to its end tag; streamed if it can only be a string."""

    def __init__(self, ends: tuple[str, ...], is_text: bool) -> None:
        self._ends, self._is_text = ends, is_text
        self._held, self._is_open = "", False

    def advance(self, text: str, calls: Calls, final: bool) -> str | None:
        """Read more text; returns the text after the end tag once that has come."""
        self._held += text
        place, end = self._end()
        if place >= 0:
            self._finish(self._held[:place].removesuffix("\n"), calls)
            return self._held[place + len(end) :]
        if self._is_text:
            # Hold back what may be the end tag, or the line end before it: neither is part of the
            # value.
            n_kept = begun_mark(self._held, self._ends) if final else max(map(len, self._ends)) + 1
            self._stream(len(self._held) - n_kept, calls, final)
        return None

    def _end(self) -> tuple[int, str]:
        """The index of the value's end and its end tag; -1 if it has not come."""
        start = 0
        if not self._is_open and self._held.lstrip().startswith(_CDATA_BEGIN):
            start = self._held.find("]]>")
        if start < 0:
            return -1, ""
        places = [(p, end) for end in self._ends if (p := self._held.find(end, start)) >= 0]
        return min(places, default=(-1, ""))

    def _stream(self, until: int, calls: Calls, final: bool) -> None:
        """Emit the first `until` characters of a string, once it is clear how it begins."""
        if not self._is_open:
            begun = self._held.lstrip()
            if begun.startswith(_CDATA_BEGIN) or (until < len(_CDATA_BEGIN) and not final):
                return
            n_blank = self._held.startswith("\n")
            self._held, until = self._held[n_blank:], until - n_blank
            calls.arguments('"')
            self._is_open = True
        if until > 0:
            calls.arguments(_escaped(self._held[:until]))
            self._held = self._held[until:]

    def _finish(self, value: str, calls: Calls) -> None:
        if not self._is_text:
            calls.arguments(_as_json(value.removeprefix("\n")))
        elif self._is_open:
            calls.arguments(_escaped(value) + '"')
        else:
            plain = _CDATA.fullmatch(value.strip())
            value = plain[1] if plain is not None else value.removeprefix("\n")
            calls.arguments(f'"{_escaped(value)}"')


class _NestedValue:
    """One argument that may have tags within, up to its own end tag."""

    def __init__(self, mark: str, key: str, schema: object) -> None:
        self._mark, self._key, self._schema = mark, key, schema
        self._held = ""

    def advance(self, text: str, calls: Calls, final: bool) -> str | None:
        """As `_Value.advance`, but nothing is emitted before the end tag."""
        self._held += text
        if f"</{self._key}>" not in self._held:
            return None
        place, end = end_of(self._held, self._mark, self._key)
        if place < 0:
            return None
        value = value_of(self._held[:place], self._mark, self._schema, _scalar)
        calls.arguments(json.dumps(value, ensure_ascii=False))
        return self._held[place + len(end) :]


def _scalar(text: str, schema: object) -> Any:
    return text if _is_text(schema, None) else json.loads(_as_json(text))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_text(schema: object, kind: str | None) -> bool:
    """Whether a parameter can only be a string; `kind` is the type in its tag, if there is one."""
    if kind is not None:
        return kind in ("true", "string")
    if not isinstance(schema, Mapping):
        return False
    kinds, values = schema.get("type"), schema.get("enum")
    if kinds is None and isinstance(values, list):
        return all(isinstance(value, str) for value in values)
    return kinds == "string" or kinds == ["string"]


def _as_json(text: str) -> str:
    plain = text.strip()
    try:
        json.loads(plain)
    except (ValueError, RecursionError):
        return _PYTHON.get(plain) or _python_as_json(plain) or json.dumps(text, ensure_ascii=False)
    return plain


def _python_as_json(text: str) -> str | None:
    """JSON for a list or object in Python's notation, which some templates show to their models."""
    if text[:1] not in ("{", "[") or len(text) > _MAX_PYTHON_CHARS:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):
            return json.dumps(ast.literal_eval(text), ensure_ascii=False)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None
