"""`models.toml`: short names for models, read and checked as a whole before any is used.

Pure reading, in any thread. The file is the user's (`--models-file`, else `models.toml` in the
working folder) or, where there is none, the one that ships with the package. It is data: what a
model needs at run time is read from the model itself, never from here.
"""

from __future__ import annotations

import difflib
import importlib.resources
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.errors import ConfigError, ModelError, WorkerError
from worker.models import reference
from worker.models.reference import HubReference

FILE_NAME = "models.toml"

_TEXTS = ("repo", "revision", "file", "sha256", "path", "quantization", "parameters", "description")
_NUMBERS = ("context_length", "size_bytes")
_KEYS = (*_TEXTS, *_NUMBERS, "bundled")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """One alias. Exactly one of `hub`, `path` and `bundled` says where the model is."""

    alias: str
    hub: HubReference | None = None
    path: Path | None = None
    bundled: bool = False
    sha256: str | None = None
    size_bytes: int | None = None
    quantization: str | None = None
    context_length: int | None = None
    parameters: str | None = None
    description: str | None = None

    @property
    def source(self) -> str:
        """Where the model comes from, in one word for a listing."""
        if self.bundled:
            return "bundled"
        return str(self.hub or self.path)


@dataclass(frozen=True, slots=True)
class Registry:
    """All aliases of one file, in its order."""

    file: Path
    entries: Mapping[str, RegistryEntry]

    def find(self, alias: str) -> RegistryEntry:
        """The entry of an alias; raises `ModelError` naming the nearest ones."""
        entry = self.entries.get(alias)
        if entry is not None:
            return entry
        near = difflib.get_close_matches(alias, self.entries, n=3, cutoff=0.5)
        known = f"did you mean {', '.join(near)}" if near else f"it knows {', '.join(self.entries)}"
        raise ModelError(
            f"The model {alias!r} is not in {str(self.file)!r} ({known}) and is no path on this "
            f"machine; give {reference.FORMS}.",
            model=alias,
        )


def load(models_file: Path | None = None) -> Registry:
    """Read the registry that applies here; raises `ConfigError` naming entry and key."""
    path = models_file or default_file()
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(
            f"The models file {str(path)!r} cannot be read: it is not a file.", field="models_file"
        )
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(
            f"The models file {str(path)!r} does not exist.", field="models_file"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"The models file {str(path)!r} cannot be read: {error.strerror}.", field="models_file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _wrong(path, f"is not valid TOML: {error}") from error
    for key in content:
        if key != "models":
            raise _wrong(path, f"has the unknown key {key!r}; only [models.ALIAS] tables are known")
    models = content.get("models", {})
    if not isinstance(models, dict):
        raise _wrong(path, "has models that is not a table")
    return Registry(path, {alias: _entry(path, alias, table) for alias, table in models.items()})


def default_file() -> Path:
    """`models.toml` of the working folder, else the one that ships."""
    here = Path(FILE_NAME)
    if here.is_file():
        return here.absolute()
    packaged = Path(str(importlib.resources.files("worker") / "assets" / FILE_NAME))
    # NOTE: in a checkout the file lies at the top level; a wheel carries it as package data.
    return packaged if packaged.is_file() else packaged.parents[2] / FILE_NAME


def _entry(path: Path, alias: str, table: Any) -> RegistryEntry:
    where = f"models.{alias}"
    if not isinstance(table, dict):
        raise _wrong(path, f"has {where} that is not a table")
    if not isinstance(reference.parse_or_none(alias), reference.AliasReference):
        raise _wrong(path, f"has the ill-formed alias {alias!r}; use letters, digits and . _ -")
    for key, value in table.items():
        _check_type(path, where, key, value)
    sources = [key for key in ("repo", "path", "bundled") if table.get(key)]
    if len(sources) != 1:
        raise _wrong(path, f"must give exactly one of repo, path and bundled in {where}")
    if sources != ["repo"]:
        for key in ("revision", "file", "sha256"):
            if key in table:
                raise _wrong(path, f"gives {where}.{key} without {where}.repo")
    sha256 = table.get("sha256")
    if sha256 is not None and (not _SHA256.fullmatch(sha256) or "file" not in table):
        raise _wrong(
            path, f"must give {where}.sha256 as 64 lower-case hex digits beside {where}.file"
        )
    return RegistryEntry(
        alias=alias,
        hub=_hub_reference(path, where, table) if "repo" in table else None,
        path=path.parent / Path(table["path"]).expanduser() if "path" in table else None,
        bundled=bool(table.get("bundled")),
        sha256=sha256,
        size_bytes=table.get("size_bytes"),
        quantization=table.get("quantization"),
        context_length=table.get("context_length"),
        parameters=table.get("parameters"),
        description=table.get("description"),
    )


def _check_type(path: Path, where: str, key: str, value: Any) -> None:
    if key not in _KEYS:
        near = difflib.get_close_matches(key, _KEYS, n=1)
        hint = f"; did you mean {near[0]}" if near else f"; known are {', '.join(_KEYS)}"
        raise _wrong(path, f"has the unknown key {where}.{key}{hint}")
    if key in _TEXTS and (not isinstance(value, str) or not value):
        raise _wrong(path, f"has {where}.{key} that is not a text")
    if key in _NUMBERS and (not isinstance(value, int) or isinstance(value, bool) or value <= 0):
        raise _wrong(path, f"has {where}.{key} that is not a positive whole number")
    if key == "bundled" and not isinstance(value, bool):
        raise _wrong(path, f"has {where}.bundled that is not true or false")


def _hub_reference(path: Path, where: str, table: Mapping[str, Any]) -> HubReference:
    """Checked by the parser of `hf:` references, so that one rule holds for both."""
    made = HubReference(table["repo"], table.get("revision"), table.get("file"))
    try:
        parsed = reference.parse(str(made))
    except WorkerError as error:
        raise _wrong(path, f"has a wrong source in {where}: {error.message}") from error
    if parsed != made:
        raise _wrong(path, f"has a wrong source in {where}: {made} is ambiguous")
    return made


def _wrong(path: Path, what: str) -> ConfigError:
    return ConfigError(f"The models file {str(path)!r} {what}.", field="models_file")
