"""Where downloaded files lie on this disk, and what is known about each.

Blocking; runs in the download's thread. One folder per repository:

    <cache>/hub/models--owner--name/
        refs/<revision>                 the commit that a branch or tag last meant
        snapshots/<commit>/<file>       the files, whole and verified
        records/<commit>/<file>.json    their size, SHA-256 and ETag, as first verified
        partial/<etag>                  what has come of a file that is still on its way

A file counts as present only with its record, its size and its SHA-256 (remembered while the file
is untouched). Files that other tools left in the hub's own cache are found too, and verified by
the hash that names their blob.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from worker.models.checksum import sha256_of_file
from worker.models.reference import COMMIT, HubReference

_HEX64 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What was verified when a file was downloaded."""

    size_bytes: int
    sha256: str
    etag: str


def snapshot_of(folder: Path) -> HubReference | None:
    """The repository and commit of a folder in this cache or the hub's own: both keep them as
    `models--owner--name/snapshots/<commit>`."""
    *_, repo, kind, commit = ("", "", *Path(os.path.abspath(folder)).parts)
    if not repo.startswith("models--") or kind != "snapshots" or not COMMIT.fullmatch(commit):
        return None
    return HubReference(repo.removeprefix("models--").replace("--", "/"), commit)


def name_of(folder: Path) -> str:
    """What a checkpoint is called: its repository where that is known, else its folder."""
    snapshot = snapshot_of(folder)
    return os.path.basename(snapshot.repo if snapshot else os.path.abspath(folder))


class RepoCache:
    """The part of the cache that belongs to one repository."""

    def __init__(self, cache_dir: Path, repo: str) -> None:
        self.cache_dir = cache_dir
        self.repo = repo
        self.root = cache_dir / "hub" / f"models--{repo.replace('/', '--')}"

    def commit_of(self, revision: str) -> str | None:
        """The commit that a revision is, or last was known to be."""
        if COMMIT.fullmatch(revision):
            return revision
        try:
            commit = self._ref(revision).read_text().strip()
        except OSError:
            return None
        return commit if COMMIT.fullmatch(commit) else None

    def remember_commit(self, revision: str, commit: str) -> None:
        if revision != commit:
            write_atomically(self._ref(revision), commit.encode())

    def snapshot(self, commit: str) -> Path:
        return self.root / "snapshots" / commit

    def path(self, commit: str, name: str) -> Path:
        return self.snapshot(commit) / name

    def partial(self, etag: str) -> Path:
        return self.root / "partial" / re.sub(r"[^\w.-]", "_", etag)[:128]

    def record(self, commit: str, name: str) -> FileRecord | None:
        content = _read_json(self._record(commit, name))
        try:
            return FileRecord(**content) if isinstance(content, dict) else None
        except TypeError:
            return None

    def store_record(self, commit: str, name: str, record: FileRecord) -> None:
        write_atomically(self._record(commit, name), json.dumps(asdict(record)).encode())

    def listing(self, commit: str) -> list[str] | None:
        """The files that make up a SafeTensors snapshot, where it was chosen before."""
        content = _read_json(self._listing(commit))
        return [str(name) for name in content] if isinstance(content, list) else None

    def store_listing(self, commit: str, names: Iterable[str]) -> None:
        write_atomically(self._listing(commit), json.dumps(list(names)).encode())

    def find(self, commit: str, name: str, sha256: str | None = None) -> Path | None:
        """A whole and untouched file, or `None`; `sha256` is a pin that it must meet."""
        path = self.path(commit, name)
        record = self.record(commit, name)
        if record is not None and path.is_file() and path.stat().st_size == record.size_bytes:
            actual = sha256_of_file(path, self.cache_dir)
            if actual == record.sha256 and sha256 in (None, actual):
                return path
        return None

    def find_all(
        self, commit: str, names: Iterable[str], pins: dict[str, str]
    ) -> dict[str, Path] | None:
        """All of the files from one cache, ours or else the hub's own; `None` if any is missing."""
        wanted = list(names)
        own = {name: self.find(commit, name, pins.get(name)) for name in wanted}
        if all(own.values()):
            return {name: path for name, path in own.items() if path is not None}
        foreign = {name: self._find_foreign(commit, name, pins.get(name)) for name in wanted}
        if all(foreign.values()):
            return {name: path for name, path in foreign.items() if path is not None}
        return None

    def _find_foreign(self, commit: str, name: str, sha256: str | None) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo, name, revision=commit)
        if not isinstance(found, str):
            return None
        path = Path(found)
        named = path.resolve().name
        if not _HEX64.fullmatch(named):
            return None
        # The hub's cache names a large file's blob by its SHA-256: the hash is its record.
        matches = sha256_of_file(path, self.cache_dir) == named and sha256 in (None, named)
        return path if matches else None

    def _ref(self, revision: str) -> Path:
        return self.root / "refs" / quote(revision, safe="")

    def _record(self, commit: str, name: str) -> Path:
        return self.root / "records" / commit / f"{name}.json"

    def _listing(self, commit: str) -> Path:
        return self.root / "records" / commit / "files.list"


def content_matches(path: Path, etag: str) -> tuple[bool, str]:
    """Whether a file is what the hub's ETag says, and the file's SHA-256.

    A large file's ETag is its SHA-256, a small one's the Git hash of its content; any other form
    (a mirror's own) says nothing about the content.
    """
    actual = sha256_of_file(path)
    if _HEX64.fullmatch(etag):
        return actual == etag, actual
    if COMMIT.fullmatch(etag):
        return _git_hash(path) == etag, actual
    return True, actual


def write_atomically(path: Path, content: bytes) -> None:
    """Write a small file so that a reader sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def _git_hash(path: Path) -> str:
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
