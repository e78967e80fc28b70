"""Proofs about schemas, before they are enforced. Pure functions, any thread.

A `oneOf` equals an `anyOf` if no value is valid under two branches: if these differ in type, in
constants, or in the constants of a required property (a discriminator). `endless_in` finds
definitions without a finite value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple


def are_disjoint(branches: Sequence[object], *, says_constants: bool) -> bool:
    """Whether the branches are proven to be disjoint; `False` also means "not known".

    With `says_constants`, a property with a single possible value is always present.
    """
    facts = [_facts_of(branch, says_constants) for branch in branches]
    return all(_differ(*pair) for pair in combinations(facts, 2))


class _Facts(NamedTuple):
    types: frozenset[str]
    """Empty if any type is allowed."""
    constants: Mapping[str | None, frozenset[Any]]
    """The allowed values of the schema itself, under `None`, and of each property that every value
    has, if only constants are allowed there."""


def _facts_of(schema: object, says_constants: bool) -> _Facts:
    if not isinstance(schema, Mapping):
        return _Facts(frozenset(), {})
    types = types_of(schema)
    found: dict[str | None, frozenset[Any] | None] = {None: _constants(schema)}
    if types == {"object"}:
        found |= _members(schema, says_constants)
    return _Facts(types, {place: each for place, each in found.items() if each is not None})


def _differ(left: _Facts, right: _Facts) -> bool:
    if left.types and right.types and left.types.isdisjoint(right.types):
        return True
    return any(
        left.constants[place].isdisjoint(right.constants[place])
        for place in left.constants.keys() & right.constants.keys()
    )


def types_of(schema: Mapping[str, object]) -> frozenset[str]:
    kinds = schema.get("type")
    listed = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    names = (kind for kind in listed if isinstance(kind, str))
    return frozenset("number" if name == "integer" else name for name in names)


def _members(
    schema: Mapping[str, object], says_constants: bool
) -> dict[str | None, frozenset[Any] | None]:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return {}
    names: Iterable[Any] = constants_in(properties) if says_constants else ()
    return {
        name: _constants(properties.get(name))
        for name in [*required, *names]
        if isinstance(name, str)
    }


def constants_in(properties: Mapping[str, object]) -> set[str]:
    """Names of properties with a single possible value."""
    return {name for name, s in properties.items() if isinstance(s, Mapping) and "const" in s}


def _constants(schema: object) -> frozenset[Any] | None:
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(map(_key, values)) if isinstance(values, list) else None


def _key(value: Any) -> Any:
    """Hashable, and equal for values that are equal in JSON, where 1 is 1.0 but not true."""
    match value:
        case bool():
            return ("bool", value)
        case list():
            return ("list", *map(_key, value))
        case dict():
            return frozenset((name, _key(each)) for name, each in value.items())
    return value


# --- definitions without a finite value ----------------------------------------------------

DEFINITIONS = "#/$defs/"
"""What a compiled `$ref` begins with; the rest is the name of a definition."""


def endless_in(definitions: Mapping[str, Any]) -> list[str]:
    """The definitions without a finite value: each value contains another one, without an end."""
    endless = dict(definitions)
    while found := [name for name, schema in endless.items() if _ends(schema, endless)]:
        for name in found:
            del endless[name]
    return list(endless)


def _ends(schema: Any, endless: Mapping[str, Any]) -> bool:
    """Whether the compiled schema has a finite value, if none of `endless` has one."""
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return True
    if schema.get("$ref", "").removeprefix(DEFINITIONS) in endless:
        return False
    if "anyOf" in schema and not any(_ends(part, endless) for part in schema["anyOf"]):
        return False
    if not all(_ends(part, endless) for part in schema.get("allOf", ())):
        return False
    kinds = types_of(schema)
    if not kinds or kinds - {"object", "array"}:
        return True
    if "object" in kinds and all(_ends(part, endless) for part in _required_members(schema)):
        return True
    return "array" in kinds and all(_ends(part, endless) for part in _required_items(schema))


def _required_members(schema: Mapping[str, Any]) -> Iterator[Any]:
    properties = schema.get("properties", {})
    other = schema.get("additionalProperties", True)
    return (properties.get(name, other) for name in schema.get("required", ()))


def _required_items(schema: Mapping[str, Any]) -> list[Any]:
    n_items, first = schema.get("minItems", 0), list(schema.get("prefixItems", ()))
    rest = [schema.get("items", True)] if n_items > len(first) else []
    return first[:n_items] + rest
