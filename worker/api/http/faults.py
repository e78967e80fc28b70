"""The faults of a bad request: where each is, what is wrong there and what would be right.

Only this module knows pydantic's errors. A fault may repeat a number or boolean of the body, never
a text. Pure functions, any thread.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import islice
from typing import Any, NotRequired, TypeGuard

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from worker.errors import InvalidRequest


class Fault(TypedDict):
    """One entry of a bad request's `errors`."""

    field: str
    constraint: str
    message: str
    value: NotRequired[float | bool]


MAX_FAULTS = 32
_NAMED_CHARS = 64
"""The most characters of an unknown field's name in a fault."""

_CONSTRAINTS = {
    "missing": "required",
    "extra_forbidden": "unknown",
    "greater_than_equal": "minimum",
    "less_than_equal": "maximum",
    "string_too_short": "minLength",
    "string_too_long": "maxLength",
    "too_short": "minItems",
    "too_long": "maxItems",
    "literal_error": "enum",
}
"""JSON Schema's keywords for pydantic's error types; all other types become `type`."""
_TYPE_ERRORS = {"string_type": "string", "int_type": "integer", "tuple_type": "array"}
_JSON_TYPES = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number that a double holds; JSON's own have no largest."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max


def fault(path: str, constraint: str, message: str, value: object = None) -> Fault:
    entry = Fault(field=path or "body", constraint=constraint, message=message)
    if isinstance(value, bool) or is_number(value):
        entry["value"] = value
    return entry


def invalid(faults: Iterable[Fault]) -> InvalidRequest:
    """The refusal for `faults`; all but the first 32 are left out."""
    listed = list(faults)[:MAX_FAULTS]
    return InvalidRequest("; ".join(f["message"] for f in listed), errors=listed)


def unknown_fields(names: Iterable[str], model: type[BaseModel]) -> InvalidRequest:
    return invalid(_unknown(name, model.model_fields) for name in islice(names, MAX_FAULTS))


def faults_of(error: ValidationError, model: type[BaseModel]) -> list[Fault]:
    """pydantic's errors as faults, each with what the field takes."""
    schema = schema_of(model)
    entries = [e for e in error.errors(include_url=False) if not _is_consequence(e)]
    return [_fault_of(entry, schema, model) for entry in entries[:MAX_FAULTS]]


@cache
def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """A model's JSON schema, which takes 10 ms to build."""
    return model.model_json_schema()


def _is_consequence(entry: ErrorDetails) -> bool:
    """Whether an array counts as too short only because one of its items was refused."""
    return entry["type"] == "too_short" and len(entry["input"]) >= entry["ctx"]["min_length"]


def _fault_of(entry: ErrorDetails, schema: Mapping[str, Any], model: type[BaseModel]) -> Fault:
    path = path_of(entry["loc"])
    kind, given = entry["type"], entry["input"]
    if kind == "extra_forbidden":
        return _unknown(path, model.model_fields)
    if kind.startswith("body."):  # from a validator of our own, with its message
        return fault(
            path, kind.removeprefix("body."), f"{path or 'the body'} {entry['msg']}", given
        )
    expected = expectation(_schemas_at(entry["loc"], schema), given, _meant(entry))
    constraint = _CONSTRAINTS.get(kind, "type")
    if constraint == "required":
        return fault(path, constraint, f"{path} is required: {expected}")
    message = f"{path or 'the body'} must be {expected}"
    if constraint.endswith(("Length", "Items")):
        unit = "character" if constraint.endswith("Length") else "item"
        n_given = len(given)
        message += f"; it has {n_given} {unit}{'' if n_given == 1 else 's'}"
    return fault(path, constraint, message, given)


def _meant(entry: ErrorDetails) -> str | None:
    """The JSON type that the branch of a union requires of a value in it."""
    below = [step for step in entry["loc"] if isinstance(step, str) and step.startswith("~")]
    return _TYPE_ERRORS.get(entry["type"]) if below and entry["loc"][-1] != below[-1] else None


def _unknown(path: str, known: Iterable[str]) -> Fault:
    path = path[:_NAMED_CHARS]
    close = difflib.get_close_matches(path.rsplit(".", 1)[-1], list(known), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return fault(path, "unknown", f"{path} is not a field here{hint}")


def path_of(loc: Iterable[int | str]) -> str:
    """A path like `messages[0].content`, without names of union branches, which begin with `~`."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("~"):
            path += f".{step}" if path else step
    return path


def _schemas_at(loc: Iterable[int | str], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts of a JSON schema that may apply to the value at `loc`."""
    found = _branches(root, root)
    for step in loc:
        if isinstance(step, int):
            found = [b for here in found if "items" in here for b in _branches(here["items"], root)]
        elif not step.startswith("~"):
            below = (
                here.get("properties", {}).get(step, here.get("additionalProperties"))
                for here in found
            )
            found = [
                b for part in below if isinstance(part, Mapping) for b in _branches(part, root)
            ]
    return found


def _branches(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The alternatives of a schema, with references resolved; the schema itself if it has none."""
    if "$ref" in schema:
        return _branches(root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], root)
    parts = schema.get("anyOf") or schema.get("oneOf")
    return [b for part in parts for b in _branches(part, root)] if parts else [schema]


# --- sentences ---------------------------------------------------------------------------


def expectation(
    schemas: Iterable[Mapping[str, Any]], given: object, meant: str | None = None
) -> str:
    """What a field takes, in words: only the form that was meant, if the value or `meant` tells."""
    forms = [schema for schema in schemas if schema.get("type") != "null"]
    kind = meant or _JSON_TYPES.get(type(given))
    nouns = dict.fromkeys(map(_noun, [form for form in forms if form.get("type") == kind] or forms))
    return " or ".join(nouns) or "any JSON value"


_PLURALS = {"string": "strings", "integer": "integers", "number": "numbers", "array": "arrays"}


def _noun(schema: Mapping[str, Any]) -> str:
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    match schema.get("type"):
        case "boolean":
            return "true or false"
        case "string":
            lengths = schema.get("minLength"), schema.get("maxLength")
            return "a string" + _range(*lengths, unit=" characters")
        case "array":
            items = " " + _PLURALS.get(schema.get("items", {}).get("type"), "items")
            sizes = _range(schema.get("minItems"), schema.get("maxItems"), unit=items)
            return "an array" + (sizes or f" of{items}")
        case "object":
            return "an object"
        case "number" | "integer" as kind:
            noun = "a number" if kind == "number" else "an integer"
            return noun + _range(schema.get("minimum"), schema.get("maximum"), "from")
        case _:
            return "any JSON value"


def _range(low: float | None, high: float | None, link: str = "of", unit: str = "") -> str:
    if low is not None and high is not None:
        return f" {link} {_plain(low)} to {_plain(high)}{unit}"
    if high is not None:
        return f" of at most {_plain(high)}{unit}"
    return f" of at least {_plain(low)}{unit}" if low is not None else ""


def _plain(bound: float) -> str:
    return str(int(bound)) if float(bound).is_integer() else str(bound)
