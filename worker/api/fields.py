"""Body fields as JSON Schema tables: one table checks a body and is published as its schema.

`check` understands the keywords that the tables use and reports *all* faults, each with the path
of its field. It is stricter than JSON Schema nowhere and prints no text of a body: only numbers
and booleans are ever repeated in a fault. Pure functions, any thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
Fault = dict[str, Any]

_NAMED_CHARS = 64  # of an unknown field's name, repeated in a fault


def check(value: object, schema: Schema, path: str = "") -> list[Fault]:
    """Every way in which `value` is not what `schema` allows."""
    if "anyOf" in schema:
        return _check_any_of(value, schema, path)
    kinds = _kinds(schema)
    if kinds and not any(_is(value, kind) for kind in kinds):
        return [fault(path, "type", _must(path, schema), value)]
    if "const" in schema and value != schema["const"]:
        return [fault(path, "const", _must(path, schema), value)]
    if "enum" in schema and value not in schema["enum"]:
        return [fault(path, "enum", _must(path, schema), value)]
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, str):
        return _check_length(value, schema, path, "Length", "character")
    if isinstance(value, int | float):
        return _check_number(value, schema, path)
    if isinstance(value, list):
        faults = _check_length(value, schema, path, "Items", "item")
        items = schema.get("items")
        if items is not None and not faults:
            for index, item in enumerate(value):
                faults += check(item, items, f"{path}[{index}]")
        return faults
    if isinstance(value, Mapping):
        return _check_object(value, schema, path)
    return []


def fault(path: str, constraint: str, message: str, value: object = None) -> Fault:
    """One entry of a bad request's `errors`; texts are never repeated in it."""
    entry: Fault = {"field": path or "body", "constraint": constraint, "message": message}
    if isinstance(value, bool) or (isinstance(value, int | float) and math.isfinite(value)):
        entry["value"] = value
    return entry


def _check_any_of(value: object, schema: Schema, path: str) -> list[Fault]:
    closest: list[Fault] | None = None
    for branch in schema["anyOf"]:
        faults = check(value, branch, path)
        if not faults:
            return []
        if not (
            len(faults) == 1 and faults[0]["field"] == path and faults[0]["constraint"] in _KIND
        ):
            closest = closest or faults
    return closest or [fault(path, "type", _must(path, schema), value)]


_KIND = ("type", "const", "enum")


def _check_number(value: float, schema: Schema, path: str) -> list[Fault]:
    if not math.isfinite(value):
        return [fault(path, "type", _must(path, schema))]
    for keyword, breached in (
        ("minimum", value < schema.get("minimum", -math.inf)),
        ("maximum", value > schema.get("maximum", math.inf)),
    ):
        if breached:
            return [fault(path, keyword, _must(path, schema), value)]
    return []


def _check_length(
    value: str | list[Any], schema: Schema, path: str, suffix: str, unit: str
) -> list[Fault]:
    length = len(value)
    for keyword, breached in (
        (f"min{suffix}", length < schema.get(f"min{suffix}", 0)),
        (f"max{suffix}", length > schema.get(f"max{suffix}", length)),
    ):
        if breached:
            found = f"it has {length} {unit}{'' if length == 1 else 's'}"
            return [fault(path, keyword, f"{_must(path, schema)}; {found}")]
    return []


def _check_object(value: Mapping[str, Any], schema: Schema, path: str) -> list[Fault]:
    properties: Mapping[str, Schema] = schema.get("properties", {})
    prefix = f"{path}." if path else ""
    faults = [
        fault(
            prefix + name,
            "required",
            f"{prefix}{name} is required: {expectation(properties[name])}",
        )
        for name in schema.get("required", ())
        if name not in value
    ]
    others = schema.get("additionalProperties", True)
    for name, item in value.items():
        if name in properties:
            faults += check(item, properties[name], prefix + name)
        elif others is False:
            named = prefix + name[:_NAMED_CHARS]
            known = ", ".join(properties)
            faults.append(fault(named, "unknown", f"{named} is not a field here; known: {known}"))
        elif isinstance(others, Mapping):
            faults += check(item, others, prefix + name[:_NAMED_CHARS])
    if len(value) > schema.get("maxProperties", len(value)):
        faults.append(fault(path, "maxProperties", _must(path, schema)))
    return faults


def _kinds(schema: Schema) -> tuple[str, ...]:
    kind = schema.get("type")
    return () if kind is None else (kind,) if isinstance(kind, str) else tuple(kind)


def _is(value: object, kind: str) -> bool:
    match kind:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, Mapping)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case _:  # integer: JSON knows one kind of number, so 1.0 is one
            if isinstance(value, bool):
                return False
            return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


# --- sentences ---------------------------------------------------------------------------


def _must(path: str, schema: Schema) -> str:
    return f"{path or 'the body'} must be {expectation(schema)}"


def expectation(schema: Schema) -> str:
    """What a field takes, in words."""
    if "anyOf" in schema:
        return " or ".join(expectation(branch) for branch in schema["anyOf"])
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join("null" if v is None else repr(v) for v in schema["enum"])
    return " or ".join(_noun(kind, schema) for kind in _kinds(schema)) or "any JSON value"


def _noun(kind: str, schema: Schema) -> str:
    match kind:
        case "null":
            return "null"
        case "boolean":
            return "true or false"
        case "string":
            return "a string" + _between(schema, "Length", "characters")
        case "array":
            return "an array" + _between(schema, "Items", "items")
        case "object":
            return "an object"
        case "number":
            return "a number" + _range(schema)
        case _:
            return "an integer" + _range(schema)


def _between(schema: Schema, suffix: str, unit: str) -> str:
    low, high = schema.get(f"min{suffix}"), schema.get(f"max{suffix}")
    if low is not None and high is not None:
        return f" of {low} to {high} {unit}"
    if high is not None:
        return f" of at most {high} {unit}"
    return f" of at least {low} {unit}" if low is not None else ""


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if high is not None:
        return f" of at most {high}"
    return f" of at least {low}" if low is not None else ""
