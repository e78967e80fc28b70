"""Reads calls whose arguments are texts in tags of their own. Any thread.

Only the function's schema tells a number from a text that looks like one. A parameter that can only
be a string is given on as it comes, with its own line ends; any other is read when its tag ends.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from worker.api.chat.parse.calls import Deltas
from worker.api.chat.parse.json_calls import escaped, from_json, to_json
from worker.api.chat.parse.source import BLANK, Header, Marks, Source, Steps

_MAX_PYTHON_CHARS = 20_000
_MAX_DEPTH = 64
"""Tags that are nested more deeply are text."""
_ENTRY = "item"
_PYTHON = {"True": "true", "False": "false", "None": "null"}
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
    """What stands before an argument's value, and what after it; the first that fits."""
    end: str
    """Stands after the last argument."""
    pad: str = ""
    """Stands on both sides of a value, within its tags."""
    nested: str = ""
    """The mark before tags within an argument, where lists and objects are written so."""


def read_tags(
    source: Source,
    deltas: Deltas,
    tags: Tags,
    follow: Marks,
    name: str,
    properties: Mapping[str, Any],
) -> Steps[bool]:
    """Read the arguments and the end of a call; one without both is none.

    What looks like the end of a value is a part of it if none of `follow` comes next: templates do
    not escape tags in texts.
    """
    n_arguments = 0
    ending = Marks(tags.end)
    while True:
        yield from source.run_of(BLANK)
        if (yield from source.here(ending)):
            source.take(tags.end)
            if not n_arguments:
                deltas.call(name)
            deltas.arguments("}" if n_arguments else "{}")
            return True
        end, fields = yield from _argument(source, tags)
        if fields is None:
            if n_arguments and not source.ended:
                deltas.arguments("}")
            return n_arguments > 0
        if not n_arguments:
            source.forget()
            deltas.call(name)
        key = fields["key"].strip()
        deltas.arguments(("{" if not n_arguments else ", ") + to_json(key) + ": ")
        n_arguments += 1
        schema = properties.get(key)
        if kind := fields.get("type"):  # the tag tells whether it is a text
            schema = {"type": "string"} if kind in ("true", "string") else None
        read = _nested if tags.nested and kinds_of(schema) != {"string"} else _plain
        if not (yield from read(source, deltas, tags, end.replace("{key}", key), follow, schema)):
            return True


def _argument(source: Source, tags: Tags) -> Steps[tuple[str, dict[str, str] | None]]:
    """Take what stands before an argument's value; what stands behind it, and the fields."""
    for header, end in tags.arguments:
        fields = yield from source.fit(header)
        if fields is not None:
            return end, fields
    return "", None


def _plain(
    source: Source, deltas: Deltas, tags: Tags, end: str, follow: Marks, schema: object
) -> Steps[bool]:
    """Read one argument's value and its end; false where the text ends before."""
    yield from source.drop(tags.pad)
    is_text = kinds_of(schema) == {"string"}
    parts: list[str] = []

    def give(text: str) -> None:
        deltas.arguments(escaped(text)) if is_text else parts.append(text)

    if is_text:
        deltas.arguments('"')
    ends = Marks(tags.pad + end, end)
    while mark := (yield from source.until(ends, give)):
        source.take(mark)
        if (yield from source.is_before(follow)):
            deltas.arguments('"' if is_text else _json_of("".join(parts), schema))
            return True
        give(mark)
    return False


def _nested(
    source: Source, deltas: Deltas, tags: Tags, end: str, follow: Marks, schema: object
) -> Steps[bool]:
    """As `_plain`, for a value that may have tags within."""
    parts: list[str] = []
    begin = end.replace("</", "<")
    depth, marks = 1, Marks(begin, end)
    while depth:
        mark = yield from source.until(marks, parts.append)
        if not mark:
            return False
        source.take(mark)
        depth += 1 if mark == begin else -1
        parts.append(mark if depth else "")
    deltas.arguments(to_json(nested_value("".join(parts), tags.nested, schema)))
    return True


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
    """A value as JSON: what it reads as, if the schema allows that, or else the text."""
    kinds, plain = kinds_of(schema), text.strip()
    try:
        found, written = from_json(plain), plain
    except ValueError:
        python = _from_python(plain)
        if python is None:
            return to_json(text)
        found, written = json.loads(python), python
    kind = _KINDS[type(found)]
    allowed = kinds is None or kind in kinds or (kind == "integer" and "number" in kinds)
    if not allowed and kinds is not None and "string" in kinds:
        return to_json(text)
    return to_json(found) if "\\u" in written else written


def _from_python(text: str) -> str | None:
    """JSON for a word, list or object in Python's notation, in which some templates write them."""
    if text in _PYTHON:
        return _PYTHON[text]
    if text[:1] not in ("{", "[") or len(text) > _MAX_PYTHON_CHARS:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):
            return to_json(ast.literal_eval(text))
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None


# --- lists and objects as tags within tags ------------------------------------------------------
# `<item>…</item>` stands for each entry of a list, `<key>…</key>` for each member of an object,
# each tag after a mark of its own. A tag in a text has no mark, so it stays text.


@dataclass(slots=True)
class _Open:
    """A tag that has not ended, with its content."""

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
