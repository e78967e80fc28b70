"""The contents of the cache, to list or to evict: downloads, partial downloads, conversions.

Blocking. huggingface_hub scans and deletes downloads (a blob goes with its last snapshot); a
conversion is one folder. A model that a running worker serves is not evicted: after a crash, the
next engine loads the same file. A worker marks it with a shared `flock` on the file itself, which
ends with the process in any case.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from worker.errors import ConfigError, ModelError
from worker.models.gguf.header import read_header

SHORTEST_KEY = 4
SHOWN_KEY = 12
CONVERTED = "converted"
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One entry that can be evicted by itself."""

    key: str
    """A commit, a conversion's key, or the ETag of a partial download."""
    kind: str
    name: str
    size_bytes: int
    last_used: float
    """Seconds since the epoch."""
    files: tuple[Path, ...]
    delete: Callable[[], object]
    locks: tuple[Path, ...] = ()
    """The lock files that a download or conversion of it holds."""

    def is_used(self) -> bool:
        """Whether a running worker serves one of the files."""
        return any(is_held(path) for path in self.files if path.exists())

    def remove(self) -> None:
        """Delete the entry; raises `ModelError` if it is served, downloaded or converted now."""
        if self.is_used():
            raise ModelError(f"A running worker serves {self.name}; nothing was removed from it.")
        from filelock import FileLock, Timeout

        with contextlib.ExitStack() as held:
            for lock in self.locks:
                try:
                    held.enter_context(FileLock(lock, timeout=0, thread_local=False))
                except Timeout:
                    raise ModelError(
                        f"{self.name} is being downloaded or converted; nothing was removed from "
                        "it."
                    ) from None
            self.delete()


def stored_models(cache_dir: Path) -> list[StoredModel]:
    """Everything in the cache, the least recently used first."""
    found = [*_downloads(cache_dir / "hub"), *_conversions(cache_dir / CONVERTED)]
    return sorted(found, key=lambda each: each.last_used)


def select(
    stored: Sequence[StoredModel], keys: Sequence[str], older_than_days: float | None
) -> list[StoredModel]:
    """The entries with these key prefixes, and unserved ones not used for `older_than_days`.

    Raises `ConfigError` for a key that is too short or does not match exactly one entry.
    """
    chosen = []
    for key in keys:
        matches = [each for each in stored if each.key.startswith(key)]
        if len(key) < SHORTEST_KEY or len(matches) != 1:
            raise ConfigError(
                f"The key {key!r} must be a prefix of exactly one entry's key in the cache, of "
                f"{SHORTEST_KEY} characters or more; it matches {len(matches)} entries.",
                field="remove",
            )
        chosen += [each for each in matches if each not in chosen]
    if older_than_days is not None:
        oldest = time.time() - older_than_days * 86_400
        old = [each for each in stored if each.last_used < oldest and each not in chosen]
        chosen += [each for each in old if not each.is_used()]
    return chosen


def _downloads(hub_dir: Path) -> Iterator[StoredModel]:
    if not hub_dir.is_dir():
        return
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir(hub_dir)
    for repo in cache.repos:
        for revision in repo.revisions:
            refs = f" ({', '.join(sorted(revision.refs))})" if revision.refs else ""
            read = [file.blob_last_accessed for file in revision.files]
            yield StoredModel(
                key=revision.commit_hash,
                kind="download",
                name=f"{repo.repo_id}{refs}",
                size_bytes=revision.size_on_disk,
                last_used=max(read, default=repo.last_accessed),
                files=tuple(file.blob_path for file in revision.files),
                delete=partial(_delete_snapshot, hub_dir, revision.commit_hash),
                locks=tuple((hub_dir / ".locks" / repo.repo_path.name).glob("*lock")),
            )
    for part in cache.incomplete_files:
        folder, key = part.file_path.parents[1].name, part.file_path.name.partition(".")[0]
        yield StoredModel(
            key=key,
            kind="unfinished",
            name=folder.removeprefix("models--").replace("--", "/"),
            size_bytes=part.size_on_disk,
            last_used=status_of(part.file_path)[1],
            files=(),
            delete=partial(part.file_path.unlink, missing_ok=True),  # gone with the last snapshot
            locks=tuple((hub_dir / ".locks" / folder).glob(f"{key}.*lock")),
        )


def _delete_snapshot(hub_dir: Path, commit: str) -> None:
    """Delete by a new scan: an earlier deletion may have removed blobs that both shared."""
    from huggingface_hub import scan_cache_dir

    scan_cache_dir(hub_dir).delete_revisions(commit).execute()


def _conversions(folder: Path) -> Iterator[StoredModel]:
    for path in folder.iterdir() if folder.is_dir() else ():
        _, last_used = status_of(path)
        if not path.is_dir():  # gone, or such as a file manager's .DS_Store
            continue
        files = [Path(at, name) for at, _, names in os.walk(path) for name in names]
        own = [file for file in files if file.parent == path]
        yield StoredModel(
            key=path.name,
            kind="conversion",
            name=_converted_name(sorted(file for file in own if file.suffix == ".gguf")),
            size_bytes=sum(status_of(file)[0] for file in files),
            last_used=last_used,
            files=tuple(file for file in files if file.suffix == ".gguf"),
            delete=partial(shutil.rmtree, path),
            locks=tuple(file for file in own if file.suffix == ".lock"),
        )


def status_of(path: Path) -> tuple[int, float]:
    """The size of a file and the time of its last change; zeros if it is gone or may not be seen,
    as downloads and conversions end at any time."""
    try:
        return (status := path.stat()).st_size, status.st_mtime
    except OSError:
        return 0, 0.0


def _converted_name(files: Sequence[Path]) -> str:
    names = []
    for path in files:
        try:
            header = read_header(path)
            names.append(f"{header.name} {header.quant_kind}")
        except ModelError:
            names.append(f"{path.name} (damaged)")
    return ", ".join(names) or "(unfinished)"


# --- marks of files in use -----------------------------------------------------------------------


def hold(path: Path) -> BinaryIO | None:
    """Open the file and mark it as in use until it is closed; `None` if the file system has no
    such locks, or another program holds an exclusive one."""
    file = path.open("rb")
    for _ in range(_ATTEMPTS):
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return file
        except BlockingIOError:  # `is_held` locks it for a moment
            time.sleep(0.002)
        except OSError:
            break
    file.close()
    return None


def is_held(path: Path) -> bool:
    """Whether a process has marked the file with `hold`."""
    # For an exclusive lock, NFS needs a file that is open for writing.
    with path.open("r+b" if os.access(path, os.W_OK) else "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False  # no locks on this file system, so nobody holds one
    return False
