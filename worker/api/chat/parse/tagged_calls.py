"""Reads calls whose arguments are texts in tags. Any thread.

Most tags do not tell a number from a text that looks like one; the function's schema does. A value
that can only be a string is passed on as it arrives, with its own line ends; any other is converted
when its tag ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from worker.api.chat.parse.calls import Deltas
from worker.api.chat.parse.json_values import PYTHON_WORDS, escaped, from_json, to_json
from worker.api.chat.parse.literal_calls import json_of_python
from worker.api.chat.parse.source import BLANK, Header, Marks, Source, Steps, end_of, marks_of

_MAX_BLANKS_AHEAD = 64
_MAX_DEPTH = 64
"""Tags that are nested deeper are text."""
_ENTRY = "item"
_KINDS: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


@dataclass(frozen=True, slots=True)
class Tags:
    """How the arguments of a call are written."""

    arguments: tuple[tuple[Header, str], ...]
    """Pairs of the header before a value and the text after it; the first that fits counts."""
    end: str
    """The text after the last argument."""
    pad: str = ""
    """White space on both sides of a value, within its tags."""
    nested: str = ""
    """The mark before each tag within an argument, if lists and objects are written as tags."""


@dataclass(slots=True)
class TaggedCall:
    """A call of `name` while it is read.

    Templates do not escape tags in texts. So an end tag is part of a value unless something comes
    next that can follow the value.
    """

    source: Source
    deltas: Deltas
    tags: Tags
    follow: Marks
    """The marks that may follow the last value."""
    name: str
    keys: set[str] = field(default_factory=set)
    """Names of the arguments so far."""

    def read(self) -> Steps[bool]:
        """Read the arguments and the end of the call; false if there is neither."""
        source, deltas, tags = self.source, self.deltas, self.tags
        ending = marks_of(tags.end)
        while True:
            yield from source.run_of(BLANK)
            if (yield from source.here(ending)):
                source.take(tags.end)
                if not self.keys:
                    deltas.call(self.name)
                deltas.end_call("}" if self.keys else "{}")
                return True
            headers = [header for header, _ in tags.arguments]
            found = yield from source.fit_one(headers)
            if found is None:
                source.drop_begun(ending, headers)
                if self.keys and not source.is_cut:
                    deltas.end_call("}")
                return bool(self.keys)
            fields = found[1]
            key = fields["key"].strip()
            end = tags.arguments[found[0]][1].replace("{key}", key)
            if not self.keys:
                source.forget()
                deltas.call(self.name)
            deltas.arguments((", " if self.keys else "{") + to_json(key) + ": ")
            self.keys.add(key)
            schema = deltas.use.properties(self.name).get(key)
            if kind := fields.get("type"):  # the tag says whether it is a text
                schema = {"type": "string"} if kind in ("true", "string") else None
            read = self._nested if tags.nested and kinds_of(schema) != {"string"} else self._plain
            if not (yield from read(end, schema)):
                return True

    def _plain(self, end: str, schema: object) -> Steps[bool]:
        """Read one argument's value and its end; false if the text ends before."""
        source, deltas, pad = self.source, self.deltas, self.tags.pad
        yield from source.drop(pad)
        is_text = kinds_of(schema) == {"string"}
        parts: list[str] = []

        def give(text: str) -> None:
            deltas.arguments(escaped(text)) if is_text else parts.append(text)

        grow_json = deltas.grow if is_text else None
        grow = (lambda text: grow_json(escaped(text))) if grow_json is not None else None
        if is_text:
            deltas.arguments('"')
        ends = marks_of(pad + end, end)
        while mark := (yield from source.until(ends, give, grow)):
            source.take(mark)
            if (yield from self._goes_on()):
                break
            give(mark)
        if is_text:
            deltas.arguments('"' if mark else "")
        elif mark or parts:  # also a value without an end: it is what arrived
            deltas.arguments(_json_of("".join(parts), schema))
        return bool(mark)

    def _goes_on(self) -> Steps[bool]:
        """Whether the text here, after white space, can follow a value: one of `follow`, the header
        of an argument that is not there yet, or the end of the text."""
        source, follow = self.source, self.follow
        while True:
            text, start = source.text, end_of(BLANK, source.text, source.at)
            fits = [header.fit(text, start) for header, _ in self.tags.arguments]
            keys = (fit[0]["key"].strip() for fit in fits if isinstance(fit, tuple))
            if follow.pattern.match(text, start) or any(key not in self.keys for key in keys):
                return True
            may_follow = "more" in fits or follow.may_become(text, start)
            if start - source.at > _MAX_BLANKS_AHEAD or not may_follow:
                return False
            if not (yield from source.more()):
                return True

    def _nested(self, end: str, schema: object) -> Steps[bool]:
        """Like `_plain`, for a value that may contain tags."""
        source, parts = self.source, list[str]()
        begin = end.replace("</", "<")
        depth, marks = 1, marks_of(begin, end)
        while depth:
            mark = yield from source.until(marks, parts.append)
            if not mark:
                break
            source.take(mark)
            depth += 1 if mark == begin else -1
            parts.append(mark if depth else "")
        if parts or not depth:
            value = nested_value("".join(parts), self.tags.nested, schema)
            self.deltas.arguments(to_json(value))
        return not depth


def kinds_of(schema: object) -> set[str] | None:
    """The types that a schema allows; `None` if it may be any."""
    if not isinstance(schema, Mapping):
        return None
    for word in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(word), Sequence):
            found = [kinds_of(branch) for branch in branches]
            return None if None in found else set().union(*(kinds or () for kinds in found))
    kinds, values = schema.get("type"), schema.get("enum")
    if kinds is None and isinstance(values, list) and values:
        return {_KINDS.get(type(each), "") for each in values}
    if isinstance(kinds, str):
        return {kinds}
    return {kind for kind in kinds if isinstance(kind, str)} if isinstance(kinds, list) else None


def _json_of(text: str, schema: object) -> str:
    """A value as JSON: what the text denotes, if the schema allows that, or else the text."""
    kinds, plain = kinds_of(schema), text.strip()
    try:
        found, written = from_json(plain), plain
    except ValueError:
        python = PYTHON_WORDS.get(plain) or json_of_python(plain)
        if python is None:
            return to_json(text)
        found, written = json.loads(python), python
    kind = _KINDS[type(found)]
    allowed = kinds is None or kind in kinds or (kind == "integer" and "number" in kinds)
    if not allowed and kinds is not None and "string" in kinds:
        return to_json(text)
    return to_json(found) if "\\u" in written else written


# --- lists and objects as tags within tags ------------------------------------------------------
# `<item>…</item>` is an entry of a list, `<key>…</key>` a member of an object, and each tag follows
# a mark. A tag in a text has no mark, so it stays text.


@dataclass(slots=True)
class _Open:
    """A tag that has not ended, with its content so far."""

    key: str
    schema: object
    text_from: int
    members: list[tuple[str, Any]]


def nested_value(text: str, mark: str, schema: object) -> Any:
    """The value that the tags of `text` describe; text between them has no meaning."""
    outer = _Open("", schema, 0, [])
    stack = [outer]
    for tag in _tags(mark).finditer(text):
        ends, key = tag["ends"] == "/", tag["key"]
        if not ends and len(stack) <= _MAX_DEPTH:
            stack.append(_Open(key, _schema_of(stack[-1].schema, key), tag.end(), []))
        elif ends and len(stack) > 1 and stack[-1].key == key:
            inner = stack.pop()
            stack[-1].members.append((key, _closed(inner, text[inner.text_from : tag.start()])))
    return _closed(outer, text)


@lru_cache(maxsize=8)
def _tags(mark: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(mark)}<(?P<ends>/?)(?P<key>[^<>\s/\]]+)>")


def _closed(tag: _Open, text: str) -> Any:
    kind = tag.schema.get("type") if isinstance(tag.schema, Mapping) else None
    if not tag.members:
        empty: dict[object, Any] = {"array": [], "object": {}}
        if kind in empty and not text.strip():
            return empty[kind]
        return text if kinds_of(tag.schema) == {"string"} else from_json(_json_of(text, tag.schema))
    if kind == "array" or (kind != "object" and all(key == _ENTRY for key, _ in tag.members)):
        return [value for _, value in tag.members]
    return dict(tag.members)


def _schema_of(schema: object, key: str) -> object:
    """The schema of a member, or of the entries of a list."""
    if not isinstance(schema, Mapping):
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return schema.get("items") if key == _ENTRY else None
