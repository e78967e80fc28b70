"""Proves that no value is valid under two branches of a `oneOf`, which then equals an `anyOf`.

The proof uses types, constants, or a required property that has other constants in each branch (a
discriminator). Pure functions, any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

_MAX_BRANCHES = 64


def are_disjoint(branches: Sequence[object], *, says_constants: bool) -> bool:
    """Whether the branches are proven to be disjoint; `False` also means "not known".

    With `says_constants`, a property with a single possible value is always present.
    """
    if len(branches) > _MAX_BRANCHES:
        return False
    return all(_differ(*pair, says_constants) for pair in combinations(branches, 2))


def _differ(left: object, right: object, says_constants: bool) -> bool:
    if not isinstance(left, Mapping) or not isinstance(right, Mapping):
        return False
    types = _types(left), _types(right)
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    if _have_other_constants(left, right):
        return True
    if types[0] != {"object"} or types[1] != {"object"}:
        return False
    return any(
        _have_other_constants(left["properties"][name], right["properties"][name])
        for name in _present(left, says_constants) & _present(right, says_constants)
    )


def _types(schema: Mapping[str, object]) -> set[str]:
    kinds = schema.get("type")
    listed = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    return {"number" if kind == "integer" else kind for kind in listed if isinstance(kind, str)}


def _present(schema: Mapping[str, object], says_constants: bool) -> set[str]:
    """Names of the described properties that every value has."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return set()
    names = {name for name in required if isinstance(name, str) and name in properties}
    return names | constants_in(properties) if says_constants else names


def constants_in(properties: Mapping[str, object]) -> set[str]:
    """Names of properties with a single possible value."""
    return {name for name, s in properties.items() if isinstance(s, Mapping) and "const" in s}


def _have_other_constants(left: object, right: object) -> bool:
    """Whether both allow only constants, and none in common."""
    values = _constants(left), _constants(right)
    return values[0] is not None and values[1] is not None and not values[0] & values[1]


def _constants(schema: object) -> set[Any] | None:
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        values = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        values = schema["enum"]
    else:
        return None
    return {_key(value) for value in values}


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
