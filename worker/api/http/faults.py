"""The faults of a bad request: for each its field, what is wrong and what is expected.

A fault may quote a number or boolean of the body, but never a text. Pure functions, any thread.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import islice
from typing import NotRequired, TypeGuard

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError
from typing_extensions import TypedDict

from worker.errors import InvalidRequest, shortened
from worker.expectations import closest, counted, expectation, path_of, sized


class Fault(TypedDict):
    """One entry of a bad request's `errors`."""

    field: str
    constraint: str
    message: str
    value: NotRequired[float | bool]


MAX_FAULTS = 32
_OWN = "body."
"""Prefix of the error types of our own validators."""
_NAMED_CHARS = 64
"""The most characters of an unknown field's name in a fault."""

_CONSTRAINTS = {
    "missing": "required",
    "extra_forbidden": "unknown",
    "greater_than_equal": "minimum",
    "less_than_equal": "maximum",
    "string_too_short": "min",
    "string_too_long": "max",
    "too_short": "min",
    "too_long": "max",
    "literal_error": "enum",
}
"""JSON Schema's keywords for pydantic's error types, else `type`; `min` and `max` get a suffix."""


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a number that a double can hold; JSON itself has no limit."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max


def fault(path: str, constraint: str, message: str, value: object = None) -> Fault:
    entry = Fault(field=path or "body", constraint=constraint, message=shortened(message))
    if isinstance(value, bool) or is_number(value):
        entry["value"] = value
    return entry


def invalid(faults: Iterable[Fault]) -> InvalidRequest:
    """The error for `faults`, of which it lists the first 32."""
    listed = list(faults)[:MAX_FAULTS]
    return InvalidRequest("; ".join(f["message"] for f in listed), errors=listed)


def refusal(path: str, constraint: str, what: str, value: object = None) -> InvalidRequest:
    """The error for one fault. In its message, `what` follows the field's name: "must be …"."""
    return invalid([fault(path, constraint, f"{path or 'the body'} {what}", value)])


def wrong(constraint: str, what: str) -> PydanticCustomError:
    """As `refusal`, but for a pydantic validator, which does not know its path."""
    return PydanticCustomError(_OWN + constraint, "{what}", {"what": what})


def unknown_fields(names: Iterable[str], model: type[BaseModel]) -> InvalidRequest:
    return invalid(_unknown(name, model.model_fields) for name in islice(names, MAX_FAULTS))


def faults_of(error: ValidationError, model: type[BaseModel]) -> list[Fault]:
    """pydantic's errors as faults, each with what its field accepts."""
    entries = [
        each
        for each in error.errors(include_url=False)
        # An array may be reported as too short only because one of its items is invalid.
        if each["type"] != "too_short" or len(each["input"]) < each["ctx"]["min_length"]
    ]
    return [_fault_of(entry, model) for entry in entries[:MAX_FAULTS]]


def _fault_of(entry: ErrorDetails, model: type[BaseModel]) -> Fault:
    path = path_of(entry["loc"])
    kind, value = entry["type"], entry["input"]
    if kind == "extra_forbidden":
        return _unknown(path, model.model_fields)
    if kind.startswith(_OWN):
        message = f"{path or 'the body'} {entry['msg']}"
        return fault(path, kind.removeprefix(_OWN), message, value)
    constraint = _CONSTRAINTS.get(kind, "type")
    if constraint == "required":
        return fault(path, constraint, f"{path} is required")
    message = f"{path or 'the body'} must be {expectation(entry)}"
    if constraint in ("min", "max"):
        _, unit, suffix = sized(value)
        constraint += suffix
        message += f"; it has {counted(len(value), unit)}"
    return fault(path, constraint, message, value)


def _unknown(path: str, known: Iterable[str]) -> Fault:
    path = path[:_NAMED_CHARS]
    hint = closest(path.rsplit(".", 1)[-1], known)
    return fault(path, "unknown", f"{path} is not a field here{hint}")
