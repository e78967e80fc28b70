"""Reads arguments whose lists and objects are tags within tags. Pure functions, any thread.

`<item>…</item>` stands for each entry of a list, `<key>…</key>` for each member of an object, each
tag after a mark of its own. A tag in a text has no mark, so it stays text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

MAX_DEPTH = 64
"""Tags that are nested more deeply are text."""
_ENTRY = "item"

Scalar = Callable[[str, object], Any]
"""A value without tags as JSON, by its schema."""


@dataclass(slots=True)
class _Open:
    """A tag that has not ended, with its content."""

    key: str
    schema: object
    text_from: int
    members: list[tuple[str, Any]]


def value_of(text: str, mark: str, schema: object, scalar: Scalar) -> Any:
    """The value that the tags of `text` describe; text between them has no meaning."""
    outer = _Open("", schema, 0, [])
    stack = [outer]
    for tag in _tags(mark).finditer(text):
        ends, key = tag["ends"] == "/", tag["key"]
        if not ends and len(stack) <= MAX_DEPTH:
            stack.append(_Open(key, _schema_of(stack[-1].schema, key), tag.end(), []))
        elif ends and len(stack) > 1 and stack[-1].key == key:
            inner = stack.pop()
            value = _closed(inner, text[inner.text_from : tag.start()], scalar)
            stack[-1].members.append((key, value))
    return _closed(outer, text, scalar)


def end_of(text: str, mark: str, key: str) -> tuple[int, str]:
    """The index and the text of the tag that ends `key`; -1 while it has not come."""
    depth = 1
    for tag in _tags(mark).finditer(text):
        if tag["key"] == key:
            depth += -1 if tag["ends"] else 1
            if not depth:
                return tag.start(), tag[0]
    return -1, ""


@lru_cache(maxsize=8)
def _tags(mark: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(mark)}<(?P<ends>/?)(?P<key>[^<>\s/\]]+)>")


def _closed(tag: _Open, text: str, scalar: Scalar) -> Any:
    kind = tag.schema.get("type") if isinstance(tag.schema, Mapping) else None
    if not tag.members:
        empty: dict[object, Any] = {"array": [], "object": {}}
        return empty[kind] if kind in ("array", "object") else scalar(text, tag.schema)
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
