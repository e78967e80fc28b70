"""Where downloads lie on this disk, and which of them are complete.

Blocking; runs in the download's thread. The layout is huggingface_hub's own, so its tools work on
it (`HF_HUB_CACHE=<cache>/hub hf cache ls`):

    <cache>/hub/models--owner--name/
        refs/<revision>             the commit of the last complete download of a branch or tag
        revisions/<revision>        the same, if the commit's files are in the user's own cache
        snapshots/<commit>/<file>   links to the blobs
        blobs/<etag>                the contents, each under its SHA-256 (small ones: Git's hash)
        blobs/<etag>.incomplete     the received part of a large file whose download is not finished
        files/<commit>              names and sizes of all files that the hub has, here or not

A blob's name is the hash of its content, so a damaged file is found without another record. Hashes
are cached while the file is untouched. Files in the user's own cache of the hub (`HF_HUB_CACHE`)
are read as well, and never changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from huggingface_hub import constants, try_to_load_from_cache

from worker.errors import ModelError
from worker.models.checkpoint_files import (
    INDEX,
    check_checkpoint,
    checkpoint_files,
    checkpoint_names,
)
from worker.models.checksum import sha256_of_file, write_whole
from worker.models.reference import COMMIT

_SHA256 = re.compile(r"[0-9a-f]{64}")


class RepoCache:
    """The part of the cache that belongs to one repository."""

    def __init__(self, cache_dir: Path, repo: str) -> None:
        self.cache_dir = cache_dir
        self.repo = repo
        self.hub_dir = cache_dir / "hub"
        self.folder = f"models--{repo.replace('/', '--')}"
        self.root = self.hub_dir / self.folder

    def commit_of(self, revision: str) -> str | None:
        """The commit that a revision is, or was at its last download; `None` if unknown."""
        if COMMIT.fullmatch(revision):
            return revision
        users = Path(constants.HF_HUB_CACHE) / self.folder / "refs"
        for refs in (self.root / "refs", self.root / "revisions", users):
            with contextlib.suppress(OSError):
                commit = (refs / revision).read_text().strip()
                if COMMIT.fullmatch(commit):
                    return commit
        return None

    def remember_commit(self, revision: str, commit: str) -> None:
        """Record the commit of a branch or tag, once all its files are here. If that cannot be
        written, the next start needs the hub."""
        if revision == commit or self.commit_of(revision) == commit:
            return
        # huggingface_hub would consider the repository damaged if `refs` named a commit that only
        # the user's own cache has.
        is_here = self.snapshot(commit).is_dir()
        with contextlib.suppress(OSError):
            for folder in ("refs", "revisions"):
                path = self.root / folder / revision
                if (folder == "refs") == is_here:
                    write_whole(path, commit.encode(), beside=self.root)
                else:
                    path.unlink(missing_ok=True)

    def files_of(self, commit: str) -> dict[str, int | None] | None:
        """The names and sizes of all files of a commit as the hub listed them, if known."""
        try:
            return msgspec.json.decode(
                (self.root / "files" / commit).read_bytes(), type=dict[str, int | None]
            )
        except (OSError, msgspec.MsgspecError):
            return None

    def remember_files(self, commit: str, files: Mapping[str, int | None]) -> None:
        with contextlib.suppress(OSError):  # as in `remember_commit`
            write_whole(self.root / "files" / commit, msgspec.json.encode(files))

    def snapshot(self, commit: str) -> Path:
        return self.root / "snapshots" / commit

    def _hub_dirs(self) -> tuple[Path, Path]:
        """The worker's own cache, and the user's."""
        return self.hub_dir, Path(constants.HF_HUB_CACHE)

    def find_all(self, commit: str, names: Sequence[str], pin: str | None) -> list[Path] | None:
        """A model's files, intact and all from one cache: the worker's, else the user's; or `None`.
        `pin` is the SHA-256 of the only file."""
        for hub_dir in self._hub_dirs():
            found = [self.find(commit, name, pin, hub_dir) for name in names]
            if None not in found:
                return [path for path in found if path is not None]
        return None

    def find(
        self, commit: str, name: str, pin: str | None = None, hub_dir: Path | None = None
    ) -> Path | None:
        """A file of a cache, by default the worker's own; `None` unless it is there and intact."""
        folder = hub_dir or self.hub_dir
        found = try_to_load_from_cache(self.repo, name, cache_dir=folder, revision=commit)
        path = Path(found) if isinstance(found, str) else None
        size = (self.files_of(commit) or {}).get(name)
        return path if path and _has_size(path, size) and self.is_intact(path, pin) else None

    def find_checkpoint(self, commit: str) -> Path | None:
        """A folder of one cache with the commit's complete SafeTensors checkpoint, or `None`."""
        listed = self.files_of(commit)
        # Other programs may have fetched only a part, which shows only with the list.
        for hub_dir in self._hub_dirs() if listed is not None else (self.hub_dir,):
            folder = hub_dir / self.folder / "snapshots" / commit
            with contextlib.suppress(ModelError):
                check_checkpoint(folder)
                names = checkpoint_names(listed or {}, folder / INDEX)
                are_here = all(_has_size(folder / name, (listed or {}).get(name)) for name in names)
                if are_here and all(map(self.is_intact, checkpoint_files(folder))):
                    return folder
        return None

    def is_intact(self, path: Path, pin: str | None = None) -> bool:
        """Whether a cached file's content agrees with its blob's name and `pin`.

        If a mirror does not name blobs by their hash, or the file is a copy because links are not
        possible, there is no such name to check.
        """
        # NOTE: follow one link only: a blob may itself be a link into a store shared by
        # repositories.
        name = Path(os.readlink(path)).name if path.is_symlink() else ""
        return content_matches(path, name, pin, self.cache_dir)

    def discard(self, path: Path) -> None:
        """Remove a damaged file and its blob if they are in the worker's own cache."""
        if path.is_relative_to(self.root) and path.exists():
            path.resolve().unlink()
            path.unlink(missing_ok=True)


def _has_size(path: Path, size: int | None) -> bool:
    """Whether a file exists and has this size, if that is known."""
    return path.exists() and size in (None, path.stat().st_size)


def content_matches(
    path: Path, etag: str, pin: str | None = None, cache_dir: Path | None = None
) -> bool:
    """Whether a file's content agrees with a pinned SHA-256, and with an ETag that is a hash."""
    expected = {pin, etag if _SHA256.fullmatch(etag) else None} - {None}
    if expected and expected != {sha256_of_file(path, cache_dir)}:
        return False
    return not COMMIT.fullmatch(etag) or _git_hash(path) == etag


def _git_hash(path: Path) -> str:
    """Git's object id of a file's content."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest()
