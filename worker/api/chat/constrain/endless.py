"""Finds compiled definitions whose values never end. Pure functions, any thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

DEFINITIONS = "#/$defs/"
"""What a compiled `$ref` begins with; the rest is the name of a definition."""


def endless_in(definitions: Mapping[str, Any]) -> list[str]:
    """The definitions whose values all hold another value of theirs, and so on without an end."""
    endless = dict(definitions)
    while found := [name for name, schema in endless.items() if _ends(schema, endless)]:
        for name in found:
            del endless[name]
    return list(endless)


def _ends(schema: Any, endless: Mapping[str, Any]) -> bool:
    """Whether the compiled schema has a value that ends, if none of `endless` has one."""
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return True
    if schema.get("$ref", "").removeprefix(DEFINITIONS) in endless:
        return False
    if "anyOf" in schema and not any(_ends(part, endless) for part in schema["anyOf"]):
        return False
    if not all(_ends(part, endless) for part in schema.get("allOf", ())):
        return False
    kinds = schema.get("type", ())
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if not kinds or kinds - {"object", "array"}:
        return True
    if "object" in kinds and all(_ends(part, endless) for part in _required_members(schema)):
        return True
    return "array" in kinds and all(_ends(part, endless) for part in _required_items(schema))


def _required_members(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas of the members that each object has."""
    properties = schema.get("properties", {})
    other = schema.get("additionalProperties", True)
    return (properties.get(name, other) for name in schema.get("required", ()))


def _required_items(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of the items that each list has."""
    n_items, first = schema.get("minItems", 0), list(schema.get("prefixItems", ()))
    rest = [schema.get("items", True)] if n_items > len(first) else []
    return first[:n_items] + rest
