"""The names of settings for users, and the message for a wrong value or file.

Used on the main thread before anything else runs, and where `models.toml` is read.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from worker.errors import ConfigError

ENV_PREFIX = "LLORCH_"
ENV_ONLY = frozenset({"worker_token", "callback_token"})
"""Secrets: a flag would be visible in the process list, and a file would be committed."""

_KEY_NAME, _KEY = re.compile(r"[A-Za-z0-9._-]{1,64}"), re.compile(r"[\x21-\x7e]+")


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def check_certificate(certificate: tuple[str, str] | None) -> None:
    """Raises `ConfigError` if the files hold no certificate chain and its key, both in PEM."""
    import ssl

    if certificate is None:
        return
    for path, field in zip(certificate, ("ssl_certfile", "ssl_keyfile"), strict=True):
        if not os.access(path, os.R_OK) or not os.path.isfile(path):
            message = f"{flag(field)} is {path!r}, which is no file that can be read."
            raise ConfigError(message, field=field)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*certificate)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--ssl-certfile {certificate[0]!r} and --ssl-keyfile {certificate[1]!r} are no "
            f"certificate with its key: {getattr(error, 'reason', None) or error}.",
            field="ssl_certfile",
        ) from None


def check_store(folder: Path) -> None:
    """Raises `ConfigError` if no engine could use this folder of `--kv-store`, or make it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    status = existing.stat()
    why = None
    if not stat.S_ISDIR(status.st_mode):
        why = f"{existing} is not a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        why = f"{existing} cannot be written to"
    elif existing == folder and (
        status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        why = "others could put files into it: it must be this user's, and chmod 700"
    if why is not None:
        raise ConfigError(f"--kv-store {folder} cannot be used: {why}.", field="kv_store")


def read_keys(path: str) -> dict[str, str]:
    """The keys of a file and the name of each. A line without a name, as llama-server has them, is
    named by its number.

    Raises `ConfigError`, which quotes no key.
    """
    field = "api_key_file"
    try:
        lines = Path(os.path.expanduser(path)).read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        message = f"--api-key-file is {path!r}, which cannot be read: {why}."
        raise ConfigError(message, field=field) from None
    found: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        name, _, key = map(str.strip, line.rpartition(":"))
        name = name or f"line-{number}"
        if not _KEY.fullmatch(key) or not _KEY_NAME.fullmatch(name):
            raise ConfigError(
                f"--api-key-file {path!r}, line {number}: it must be NAME:KEY, a name of up to 64 "
                "letters, digits, dots, - or _, and a key of visible ASCII characters.",
                field=field,
            )
        if key in found or name in found.values():
            message = (
                f"--api-key-file {path!r}, line {number}: its name or its key was there before."
            )
            raise ConfigError(message, field=field)
        found[key] = name
    if not found:
        raise ConfigError(f"--api-key-file {path!r} has no key.", field=field)
    return found


def closest(name: str, candidates: list[str]) -> str:
    """`; did you mean …?` for an unknown name, or nothing."""
    match = difflib.get_close_matches(name, candidates, n=1)
    return f"; did you mean {match[0]}?" if match else ""


def variable_of(name: str) -> str:
    return ENV_PREFIX + name.upper()


def read_toml(path: Path, what: str, field: str) -> dict[str, Any]:
    """What is in a TOML file that a user writes; `what` says which file it is to the worker.

    Raises `ConfigError` if it cannot be read or is not TOML.
    """
    try:
        if not path.is_file():
            path.stat()
            raise OSError(0, "it is not a file")
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except ValueError as error:
        why = f"is not valid TOML: {error}"
    raise ConfigError(f"The {what} {str(path)!r} {why}.", field=field)


def first_fault(error: ValidationError, model: type[BaseModel]) -> str:
    """The first fault of a file that `model` describes, as `workers[0].replicas: …`."""
    fault = error.errors(include_url=False)[0]
    place = ""
    for step in fault["loc"]:
        place += f"[{step}]" if isinstance(step, int) else f".{step}" if place else str(step)
        model = _nested(model, step) or model
    if fault["type"] == "extra_forbidden":
        name, known = str(fault["loc"][-1]), list(model.model_fields)
        return f"{place} is not a field" + (
            closest(name, known) or f"; known are {', '.join(known)}"
        )
    is_ours = fault["type"] == "value_error"
    what = str(fault["ctx"]["error"]) if is_ours else _expectation(fault)
    return (f"{place}: {what}" if place else what).rstrip(".")


def _nested(model: type[BaseModel], step: int | str) -> type[BaseModel] | None:
    """The model that a field holds, be it in a list or a table."""
    info = model.model_fields.get(str(step))
    kinds = [info.annotation] if info else []
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        kinds += get_args(kind)
    return None


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
        case "float_parsing" | "float_type" | "finite_number":
            return "it must be a number"
        case "bool_parsing" | "bool_type":
            return "it must be true or false"
        case "literal_error":
            return f"it must be one of {context['expected']}"
        case "missing":
            return "it is missing"
        case "string_type" | "string_too_short":
            return "it must be a text"
        case "model_type" | "dict_type":
            return "it must be a table"
        case "string_pattern_mismatch":
            return "it must consist of visible ASCII characters without spaces"
        case "value_error":
            return "it " + str(context["error"])
        case _:
            return fault["msg"][0].lower() + fault["msg"][1:]
