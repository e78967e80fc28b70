"""The names of settings as users see them, and the messages for wrong values and files.

Used on the main thread before anything else runs, and when `models.toml` is read.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from worker.errors import ConfigError, flag
from worker.expectations import closest, expectation, path_of

ENV_PREFIX = "LLORCH_"
ENV_ONLY = frozenset({"worker_token", "callback_token"})
"""Secrets: a flag would be visible in the process list, and a file would be committed."""


def variable_of(name: str) -> str:
    return ENV_PREFIX + name.upper()


def set_variables(name: str) -> list[str]:
    """The environment variables that set it, as spelled there: case is ignored, and an empty one
    counts as unset."""
    variable = variable_of(name)
    return [each for each in os.environ if each.upper() == variable and os.environ[each]]


def read_toml(path: Path, what: str, field: str) -> dict[str, Any]:
    """The content of a TOML file that a user writes; `what` names the file's role in messages.

    Raises `ConfigError` if it cannot be read or is not TOML.
    """
    try:
        if not path.is_file():
            path.stat()
            raise OSError(0, "it is not a file")
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except ValueError as error:
        why = f"is not valid TOML: {error}"
    except RecursionError:
        why = "nests its brackets too deeply"
    raise ConfigError(f"The {what} {str(path)!r} {why}.", field=field)


def first_fault(error: ValidationError, model: type[BaseModel]) -> str:
    """The first fault of a file that `model` describes, such as `workers[0].replicas: …`."""
    fault = error.errors(include_url=False)[0]
    place = path_of(fault["loc"])
    for step in fault["loc"]:
        model = _nested(model, step) or model
    if fault["type"] == "extra_forbidden":
        name, known = str(fault["loc"][-1]), list(model.model_fields)
        return f"{place} is not a field" + (
            closest(name, known) or f"; known are {', '.join(known)}"
        )
    is_ours = fault["type"] == "value_error"
    what = str(fault["ctx"]["error"]) if is_ours else _expectation(fault, "a table")
    return (f"{place}: {what}" if place else what).rstrip(".")


def _nested(model: type[BaseModel], step: int | str) -> type[BaseModel] | None:
    """The model of a field's value, or of the items of its list or table."""
    info = model.model_fields.get(str(step))
    kinds = [info.annotation] if info else []
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        kinds += get_args(kind)
    return None


def explain(
    error: ValidationError,
    flags: Mapping[str, Any],
    order: Sequence[str],
    others: Mapping[str, str],
) -> ConfigError:
    """The first fault as one sentence that names the value's origin; `details` has all faults.

    Faults are sorted by `order`, the order of the fields. `others` has the origins of values that
    come from neither a flag nor a variable.
    """
    faults = error.errors(include_url=False)
    faults.sort(key=lambda fault: (*order, _name(fault)).index(_name(fault)))
    sentences = [_sentence(fault, flags, others) for fault in faults]
    fields = [_name(fault) for fault in faults]
    more = f" ({len(sentences) - 1} more: {', '.join(fields[1:])}.)" if len(sentences) > 1 else ""
    return ConfigError(sentences[0] + more, field=fields[0], errors=sentences)


_FORMS = {
    "api_prefix": "it must be a path such as /llm",
    "worker_id": "it must consist of visible ASCII characters without spaces",
    "name": "it must be up to 100 letters, digits, '.', '_' and '-', with a letter or digit first",
}
"""What a field's pattern requires, if that is more than visible ASCII characters."""


_MOST_QUOTED = 200
"""The most characters of a value that a message quotes."""


def _name(fault: ErrorDetails) -> str:
    return str(fault["loc"][0]) if fault["loc"] else "configuration"


def _sentence(fault: ErrorDetails, flags: Mapping[str, Any], others: Mapping[str, str]) -> str:
    name = _name(fault)
    variable = variable_of(name)
    set_as = set_variables(name)
    origin = flag(name) if name in flags else set_as[0] if set_as else others.get(name, name)
    value = fault["input"]
    # The values of a repeated flag are a list here; show them as they were written.
    texts = value if name in flags and isinstance(value, list | tuple) else (value,)
    shown = ", ".join(map(repr, texts)) or "empty"
    given = "a secret that cannot be sent" if name in ENV_ONLY else shown
    if name.endswith("_url") and isinstance(fault["input"], str):
        given = repr(without_secrets(fault["input"]))
    if len(given) > _MOST_QUOTED:
        given = f"{given[:_MOST_QUOTED]}… ({len(given):,} characters)"
    if variable.endswith("_PORT") and str(fault["input"]).startswith("tcp://"):
        return (
            f"{origin} is {given}, which Kubernetes sets for a Service of that name; "
            "set enableServiceLinks: false in the pod or give --port."
        )
    return f"{origin} is {given}; {_expectation(fault)}."


def _expectation(fault: ErrorDetails, an_object: str = "an object") -> str:
    match fault["type"]:
        case "missing":
            return "it is missing"
        case "string_pattern_mismatch":
            name = str(fault["loc"][-1])
            return _FORMS.get(name, "it must consist of visible ASCII characters")
        case "value_error":
            return f"it {fault['ctx']['error']}"
        case _:
            return f"it must be {expectation(fault)}".replace("an object", an_object)


_USER = re.compile(r"^([^/]*//)?[^/]*@")


def without_secrets(url: str) -> str:
    """The URL for logs: without a query, a user, or a password, which may contain ? and #."""
    return re.split("[?#]", _USER.sub(r"\1", url))[0]
