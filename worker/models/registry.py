"""`models.toml`: short names for models, read and checked as a whole before any is used.

Pure reading, in any thread. The file is the user's (`--models-file`, else `models.toml` in the
working folder), else the one in the package. It says where models are; what a model needs at run
time is read from the model itself.
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
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from worker.errors import ConfigError, ModelError, WorkerError
from worker.models import reference
from worker.models.reference import HubReference

FILE_NAME = "models.toml"

_SHA256 = re.compile(r"[0-9a-f]{64}")
_NOUNS = {
    "string_type": "a text",
    "string_too_short": "a text",
    "int_type": "a positive whole number",
    "greater_than": "a positive whole number",
    "bool_type": "true or false",
}
"""The expected value of a field, by the type of pydantic's error."""

_Text = Annotated[str, Field(min_length=1)]
_Count = Annotated[int, Field(gt=0)]


class RegistryEntry(BaseModel):
    """A table `[models.ALIAS]`; exactly one of `repo`, `path` and `bundled` is given."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    repo: _Text | None = None
    revision: _Text | None = None
    file: _Text | None = None
    sha256: _Text | None = None
    path: _Text | None = None
    """As it is written it may be relative to the registry's folder; once loaded it is not."""
    bundled: bool = False
    size_bytes: _Count | None = None
    quantization: _Text | None = None
    context_length: _Count | None = None
    parameters: _Text | None = None
    description: _Text | None = None

    @property
    def hub(self) -> HubReference | None:
        return HubReference(self.repo, self.revision, self.file) if self.repo else None

    @property
    def source(self) -> str:
        return "bundled" if self.bundled else str(self.hub or self.path)


@dataclass(frozen=True, slots=True)
class Registry:
    """All aliases of one file, in its order."""

    file: Path
    entries: Mapping[str, RegistryEntry]

    def find(self, alias: str) -> RegistryEntry:
        """The entry of an alias; raises `ModelError` naming similar ones."""
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
    """Read the registry; raises `ConfigError` naming entry and key."""
    path = models_file or default_file()
    if os.path.exists(path) and not os.path.isfile(path):
        raise _wrong(path, "cannot be read: it is not a file")
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except FileNotFoundError:
        raise _wrong(path, "does not exist") from None
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from error
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
    """`models.toml` of the working folder, else the one in the package."""
    here = Path(FILE_NAME)
    if here.is_file():
        return here.absolute()
    packaged = Path(str(importlib.resources.files("worker") / "assets" / FILE_NAME))
    # NOTE: a checkout has the file at its top level; a wheel has it as package data.
    return packaged if packaged.is_file() else packaged.parents[2] / FILE_NAME


def _entry(path: Path, alias: str, written: Any) -> RegistryEntry:
    where = f"models.{alias}"
    if not isinstance(written, dict):
        raise _wrong(path, f"has {where} that is not a table")
    if not reference.is_alias(alias):
        raise _wrong(path, f"has the ill-formed alias {alias!r}; use letters, digits and . _ -")
    try:
        entry = RegistryEntry.model_validate(written)
    except ValidationError as error:
        raise _wrong(path, _first_fault(where, error)) from None
    if sum(map(bool, (entry.repo, entry.path, entry.bundled))) != 1:
        raise _wrong(path, f"must give exactly one of repo, path and bundled in {where}")
    for key in ("revision", "file", "sha256"):
        if key in written and not entry.repo:
            raise _wrong(path, f"gives {where}.{key} without {where}.repo")
    if entry.sha256 and not (entry.file and _SHA256.fullmatch(entry.sha256)):
        raise _wrong(
            path, f"must give {where}.sha256 as 64 lower-case hex digits beside {where}.file"
        )
    if entry.hub is not None:
        _check_hub(path, where, entry.hub)
    if entry.path is None:
        return entry
    return entry.model_copy(update={"path": str(path.parent / os.path.expanduser(entry.path))})


def _first_fault(where: str, error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    key, known = str(fault["loc"][0]), list(RegistryEntry.model_fields)
    if fault["type"] != "extra_forbidden":
        return f"has {where}.{key} that is not {_NOUNS[fault['type']]}"
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}" if near else f"known are {', '.join(known)}"
    return f"has the unknown key {where}.{key}; {hint}"


def _check_hub(path: Path, where: str, hub: HubReference) -> None:
    """Check a hub reference by the parser of `hf:`, so that one rule holds for both."""
    try:
        parsed = reference.parse(str(hub))
    except WorkerError as error:
        raise _wrong(path, f"has a wrong source in {where}: {error.message}") from error
    if parsed != hub:
        raise _wrong(path, f"has a wrong source in {where}: {hub} is ambiguous")


def _wrong(path: Path, what: str) -> ConfigError:
    return ConfigError(f"The models file {str(path)!r} {what}.", field="models_file")
