"""The names of settings for users, and the message for a wrong value.

Pure text; used on the main thread before anything else runs.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from worker.errors import ConfigError

ENV_PREFIX = "LLORCH_"
ENV_ONLY = frozenset({"worker_token", "callback_token"})
"""Secrets: a flag would be visible in the process list, and a file would be committed."""


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def closest(name: str, candidates: list[str]) -> str:
    """`; did you mean …?` for an unknown name, or nothing."""
    match = difflib.get_close_matches(name, candidates, n=1)
    return f"; did you mean {match[0]}?" if match else ""


def variable_of(name: str) -> str:
    return ENV_PREFIX + name.upper()


def explain(error: ValidationError, flags: Mapping[str, Any], order: Sequence[str]) -> ConfigError:
    """The first fault as one sentence that names the value's origin; all are in `details`.

    The faults come in `order`, that of the fields.
    """
    faults = error.errors(include_url=False)
    faults.sort(key=lambda fault: (*order, _name(fault)).index(_name(fault)))
    sentences = [_sentence(fault, flags) for fault in faults]
    fields = [_name(fault) for fault in faults]
    more = f" ({len(sentences) - 1} more: {', '.join(fields[1:])}.)" if len(sentences) > 1 else ""
    return ConfigError(sentences[0] + more, field=fields[0], errors=sentences)


def _name(fault: ErrorDetails) -> str:
    return str(fault["loc"][0]) if fault["loc"] else "configuration"


def _sentence(fault: ErrorDetails, flags: Mapping[str, Any]) -> str:
    name = _name(fault)
    variable = variable_of(name)
    if name in flags:
        origin = flag(name)
    elif os.environ.get(variable):
        origin = variable
    else:
        origin = name
    given = "a secret that is too short" if name in ENV_ONLY else repr(fault["input"])
    if variable.endswith("_PORT") and str(fault["input"]).startswith("tcp://"):
        return (
            f"{origin} is {given}, which Kubernetes sets for a Service of that name; "
            "set enableServiceLinks: false in the pod or give --port."
        )
    return f"{origin} is {given}; {_expectation(fault)}."


def _expectation(fault: ErrorDetails) -> str:
    context = fault.get("ctx", {})
    match fault["type"]:
        case "less_than_equal":
            return f"it must be at most {context['le']}"
        case "greater_than_equal":
            return f"it must be at least {context['ge']}"
        case "greater_than":
            return f"it must be more than {context['gt']}"
        case "int_parsing" | "int_from_float" | "int_type":
            return "it must be a whole number"
        case "float_parsing" | "float_type":
            return "it must be a number"
        case "bool_parsing" | "bool_type":
            return "it must be true or false"
        case "literal_error":
            return f"it must be one of {context['expected']}"
        case "string_pattern_mismatch":
            return "it must consist of visible ASCII characters without spaces"
        case "value_error":
            return "it " + str(context["error"])
        case _:
            return fault["msg"][0].lower() + fault["msg"][1:]
