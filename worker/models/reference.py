"""Parses the value of `--model`: every form of a model reference, as one closed set of types.

Pure: it reads only the text. `resolve` reads the disk and the network.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from worker.errors import ConfigError
from worker.setting_faults import without_secrets

CHECKPOINTS = "an alias of models.toml, a folder of SafeTensors or hf:owner/repo@revision"
"""The forms that name a model that can be converted."""
FORMS = (
    "an alias of models.toml, a .gguf file, a folder of SafeTensors, hf:owner/repo:Q4_K_M@revision "
    "or hf:owner/repo@revision::file=path/in/repo.gguf"
)

_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_QUANTISATION = re.compile(r"[A-Za-z0-9][\w-]*", re.ASCII)
_REVISION = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
_ELSEWHERE = re.compile(r"[\\\0]|(?:^|/)[A-Za-z]:")
"""A backslash, or a drive's letter."""


@dataclass(frozen=True, slots=True)
class HubReference:
    """A Hugging Face repository; without `file` or `quantisation`, its SafeTensors or one of its
    GGUFs."""

    repo: str
    revision: str | None = None
    file: str | None = None
    quantisation: str | None = None
    """As in the name of its file, in either case: `Q4_K_M`."""

    @property
    def is_gguf(self) -> bool:
        return self.file is not None or self.quantisation is not None

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, whose files never change."""
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        quantisation = f":{self.quantisation}" if self.quantisation else ""
        revision = f"@{self.revision}" if self.revision else ""
        file = f"::file={self.file}" if self.file else ""
        return f"hf:{self.repo}{quantisation}{revision}{file}"


Reference = str | Path | HubReference
"""An alias or a path that looks like one, another path on this machine, or a repository."""


def parse(text: str, forms: str = FORMS) -> Reference:
    """Parse a model reference; raises `ConfigError` naming the wrong part or the valid `forms`."""
    if not text or "\0" in text or text != text.strip():
        raise _wrong(text, f"must be {forms}")
    if text.startswith("hf:"):
        return _parse_hub(text)
    scheme = re.match(r"([a-z][a-z0-9+.-]*)://", text)
    if scheme:
        raise _wrong(
            without_secrets(text), f"is a {scheme[1]} address; a model is named by {forms}"
        )
    return text if is_alias(text) else Path(os.path.expanduser(text))


def is_like_repository(text: str) -> bool:
    """Whether a path that does not exist may be `owner/repo`, written without `hf:`."""
    location = text.partition("::")[0].partition("@")[0]
    is_repo = "/" in location and _REPO.fullmatch(location.partition(":")[0]) is not None
    return is_repo and not location.endswith((".gguf", ".safetensors"))


def is_alias(text: str) -> bool:
    is_other = text.startswith("hf:") or text.endswith((".gguf", ".safetensors"))
    return _ALIAS.fullmatch(text) is not None and not is_other


def _parse_hub(text: str) -> HubReference:
    location, *options = text.removeprefix("hf:").split("::")
    place, at, revision = location.partition("@")
    repo, colon, quantisation = place.partition(":")
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo:
        form = "hf:owner/repo, and a file in it as hf:owner/repo:Q4_K_M or ::file=name.gguf"
        raise _wrong(text, f"must name its repository as {form}")
    if colon and not _QUANTISATION.fullmatch(quantisation):
        raise _wrong(text, f"must name a quantisation such as hf:{repo}:Q4_K_M after the colon")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise _wrong(text, "has an empty or ill-formed revision after the @")
    file: str | None = None
    for option in options:
        key, _, value = option.partition("=")
        if key != "file":
            raise _wrong(text, f"has the unknown option {key!r}; only file= is known")
        if file is not None:
            raise _wrong(text, "names two files")
        if quantisation:
            raise _wrong(text, "names a file and a quantisation; one is enough")
        file = value
        if not is_inside_repository(file):
            raise _wrong(text, f"must give file= as a path inside the repository, not {file!r}")
        if not file.endswith(".gguf"):
            raise _wrong(text, f"must give a .gguf file as file=, not {file!r}")
    return HubReference(repo, revision or None, file, quantisation or None)


def is_inside_repository(name: str) -> bool:
    """Whether a name is a relative, normalized path with forward slashes, on Windows as well;
    huggingface_hub requires this of names."""
    path = PurePosixPath(name)
    is_normal = str(path) == name and name != "." and ".." not in path.parts
    return is_normal and not path.is_absolute() and not _ELSEWHERE.search(name)


def is_projector(name: str) -> bool:
    """Whether a file is a projector by its name; it lies beside the model that it belongs to."""
    base = PurePosixPath(name).name.lower()
    return "mmproj" in base and base.endswith(".gguf")


def snapshot_of(folder: Path) -> HubReference | None:
    """The repository and commit of `models--owner--name/snapshots/<commit>`; else `None`."""
    *_, repo, kind, commit = ("", "", *Path(os.path.abspath(folder)).parts)
    if not repo.startswith("models--") or kind != "snapshots" or not COMMIT.fullmatch(commit):
        return None
    return HubReference(repo.removeprefix("models--").replace("--", "/"), commit)


def name_of(folder: Path) -> str:
    """A checkpoint's name: that of its repository if it is known, else that of its folder."""
    snapshot = snapshot_of(folder)
    return os.path.basename(snapshot.repo if snapshot else os.path.abspath(folder))


def _wrong(text: str, what: str) -> ConfigError:
    return ConfigError(f"The model reference {text!r} {what}.", field="model", value=text)
