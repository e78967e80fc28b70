"""Where a GGUF comes from, written into its metadata as `llorch.convert.*`.

The digest of the source is that of the list which `sha256sum` prints for its files, sorted by
name, so anybody can make it again. Hashing runs on a thread of its own while weights are converted
(hashlib leaves the interpreter lock), and the digest is patched into the header afterwards.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from worker.convert.architectures import Metadata

SOURCE = "llorch.convert.source"
REVISION = "llorch.convert.revision"
VERSION = "llorch.convert.version"
OUTTYPE = "llorch.convert.outtype"
DIGEST = "llorch.convert.source_sha256"

PLACEHOLDER = "?" * 64
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_SNAPSHOT = re.compile(r"[0-9a-f]{40}")
_BLOB = re.compile(r"[0-9a-f]{64}")
_BLOCK_BYTES = 4 << 20


def describe(folder: Path, outtype: str, name: str | None = None) -> Metadata:
    """The keys that are known before the weights are read."""
    resolved = folder.absolute()
    found: Metadata = {
        SOURCE: name or resolved.name,
        VERSION: _version(),
        OUTTYPE: outtype,
        DIGEST: PLACEHOLDER,
    }
    # The hub's cache keeps a revision's files in `models--owner--name/snapshots/REVISION`.
    if _SNAPSHOT.fullmatch(resolved.name) and resolved.parent.name == "snapshots":
        found[REVISION] = resolved.name
        found[SOURCE] = resolved.parent.parent.name.removeprefix("models--").replace("--", "/")
    return found


def _version() -> str:
    try:
        return version("llorch-worker")
    except PackageNotFoundError:  # Run from a checkout that is not installed.
        return "unknown"


def source_files(folder: Path) -> list[Path]:
    return sorted({path for pattern in _PATTERNS for path in folder.glob(pattern)})


def digest(folder: Path) -> str:
    lines = (f"{file_sha256(path)}  {path.name}\n" for path in source_files(folder))
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
