"""`models.toml`: short names for models, read and checked as a whole before any is used.

Only reads, in any thread. The file is the user's (`--models-file`, else `models.toml` in the
working folder), else the one in the package. It says where models are; what a model needs at run
time is read from the model itself.
"""

from __future__ import annotations

import difflib
import importlib.resources
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from worker.errors import ConfigError, ModelError, WorkerError
from worker.models import reference
from worker.models.reference import HubReference
from worker.setting_faults import first_fault, read_toml

FILE_NAME = "models.toml"

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
    """In the file it may be relative to the file's folder; `load` makes it absolute."""
    bundled: bool = False
    size_bytes: _Count | None = None
    quantization: _Text | None = None
    context_length: _Count | None = None
    parameters: _Text | None = None
    description: _Text | None = None

    @model_validator(mode="after")
    def _names_one_source(self) -> Self:
        if sum(map(bool, (self.repo, self.path, self.bundled))) != 1:
            raise ValueError("exactly one of repo, path and bundled must be given")
        for key in ("revision", "file", "sha256"):
            if getattr(self, key) is not None and not self.repo:
                raise ValueError(f"{key} is given without repo")
        if self.sha256 and not (self.file and re.fullmatch("[0-9a-f]{64}", self.sha256)):
            raise ValueError("sha256 must be 64 lower-case hex digits, beside a file")
        if self.hub is not None:
            try:
                parsed = reference.parse(str(self.hub))  # one rule for both
            except WorkerError as error:
                raise ValueError(error.message) from None
            if parsed != self.hub:
                raise ValueError(f"{self.hub} is ambiguous")
        return self

    @property
    def hub(self) -> HubReference | None:
        return HubReference(self.repo, self.revision, self.file) if self.repo else None

    @property
    def source(self) -> str:
        return "bundled" if self.bundled else str(self.hub or self.path)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    models: dict[str, RegistryEntry] = {}


@dataclass(frozen=True, slots=True)
class Registry:
    file: Path
    entries: Mapping[str, RegistryEntry]

    def find(self, alias: str, forms: str = reference.FORMS) -> RegistryEntry:
        """The entry of an alias; raises `ModelError` naming similar ones and the `forms`."""
        entry = self.entries.get(alias)
        if entry is not None:
            return entry
        near = difflib.get_close_matches(alias, self.entries, n=3, cutoff=0.5)
        has = f"it has {', '.join(self.entries) or 'no models'}"
        known = f"did you mean {', '.join(near)}" if near else has
        raise ModelError(
            f"The model {alias!r} is not in {str(self.file)!r} ({known}) and is not a path on "
            f"this machine; give {forms}.",
            model=alias,
        )


def load(models_file: Path | None = None) -> Registry:
    """Read the registry; raises `ConfigError` naming the wrong entry and key."""
    path = Path(os.path.expanduser(models_file)) if models_file else default_file()
    table = read_toml(path, "models file", "models_file")
    try:
        entries = _File.model_validate(table).models
    except ValidationError as error:
        raise _wrong(path, first_fault(error, _File)) from None
    for alias, entry in entries.items():
        if not reference.is_alias(alias):
            what = f"the alias {alias!r} is ill-formed; use letters, digits and . _ -"
            raise _wrong(path, what)
        if entry.path is not None:
            absolute = str(path.parent / os.path.expanduser(entry.path))
            entries[alias] = entry.model_copy(update={"path": absolute})
    return Registry(path, entries)


def default_file() -> Path:
    """`models.toml` in the working folder, else the one in the package."""
    here = Path(FILE_NAME)
    if here.is_file():
        return here.absolute()
    packaged = Path(str(importlib.resources.files("worker") / "assets" / FILE_NAME))
    # NOTE: a checkout has the file at its top level; a wheel has it as package data.
    return packaged if packaged.is_file() else packaged.parents[2] / FILE_NAME


def _wrong(path: Path, what: str) -> ConfigError:
    return ConfigError(f"The models file {str(path)!r}: {what}", field="models_file")
