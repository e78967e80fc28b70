"""Where a GGUF comes from, written into its metadata as `llorch.convert.*`.

The digest of the source is that of the list which `sha256sum` prints for its files, sorted by
name, so anybody can make it again. Hashing runs on a thread of its own while weights are converted
and verified (hashlib leaves the interpreter lock); the digest is patched into the header at last.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from worker.convert.architectures import Metadata
from worker.models.checkpoint_files import checkpoint_files
from worker.models.hub_cache import name_of, snapshot_of

SOURCE = "llorch.convert.source"
REVISION = "llorch.convert.revision"
VERSION = "llorch.convert.version"
OUTTYPE = "llorch.convert.outtype"
DIGEST = "llorch.convert.source_sha256"

PLACEHOLDER = "?" * 64
_BLOB = re.compile(r"[0-9a-f]{64}")
_BLOCK_BYTES = 256 << 10
"""Stays in the processor's cache between its reading and its hashing."""


def describe(folder: Path, outtype: str, name: str | None = None) -> Metadata:
    """The keys that are known before the weights are read."""
    found: Metadata = {
        SOURCE: name or name_of(folder),
        VERSION: _version(),
        OUTTYPE: outtype,
        DIGEST: PLACEHOLDER,
    }
    snapshot = snapshot_of(folder)
    if snapshot is not None and snapshot.revision is not None:
        found |= {SOURCE: snapshot.repo, REVISION: snapshot.revision}
    return found


def _version() -> str:
    try:
        return version("llorch-worker")
    except PackageNotFoundError:  # Run from a checkout that is not installed.
        return "unknown"


def digest(folder: Path) -> str:
    """Of a checkpoint's files, by their content and their paths inside the folder."""
    files = checkpoint_files(folder)
    lines = (f"{file_sha256(path)}  {path.relative_to(folder)}\n" for path in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Of a file's bytes; files of the hub's cache that are stored under their hash have it."""
    real = path.resolve()
    if real.parent.name == "blobs" and _BLOB.fullmatch(real.name):
        return real.name
    hasher = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(_BLOCK_BYTES)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            hasher.update(view[:count])
    return hasher.hexdigest()


class Hashing:
    """`digest` in the background; `result` waits for it."""

    def __init__(self, folder: Path) -> None:
        self._found: Sequence[str] = ()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(folder,), daemon=True)
        self._thread.start()

    def _run(self, folder: Path) -> None:
        try:
            self._found = (digest(folder),)
        except OSError as error:  # Carried to the thread that asks for the result.
            self._error = error

    def result(self) -> str:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found[0]
