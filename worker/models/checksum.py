"""Cached SHA-256 of files: a model of many gigabytes is hashed once, not at every start.

Blocking; runs in a thread. A cached hash is valid while the file's size, inode and times of
modification and status change (in nanoseconds) stay the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from functools import partial
from pathlib import Path


def sha256_of_file(path: Path, cache_dir: Path | None = None) -> str:
    """The file's SHA-256 in hex, from `<cache_dir>/hashes` if that is still valid."""
    real = path.resolve()
    if cache_dir is None:
        return _hash(real)
    note = cache_dir / "hashes" / f"{hashlib.sha256(os.fsencode(real)).hexdigest()}.json"
    stamp = _stamp(real)
    remembered = _read_note(note)
    if remembered.get("stamp") == stamp:
        return str(remembered["sha256"])
    digest = _hash(real)
    if _stamp(real) == stamp:
        content = {"path": str(real), "stamp": stamp, "sha256": digest}
        with contextlib.suppress(OSError):  # without the note, the next start hashes again
            write_whole(note, json.dumps(content).encode())
    return digest


def sha256_of_range(path: Path, offset: int, size: int) -> str:
    """The SHA-256 in hex of `size` bytes from `offset`, or of as many as the file has."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(offset)
        while size and (block := file.read(min(size, 1 << 20))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read_note(note: Path) -> dict[str, object]:
    """The cached entry; empty if there is none or it is damaged."""
    try:
        content = json.loads(note.read_bytes())
    except (OSError, ValueError):
        return {}
    is_whole = isinstance(content, dict) and isinstance(content.get("sha256"), str)
    return content if is_whole else {}


def write_whole(path: Path, content: bytes, beside: Path | None = None, mode: int = 0o666) -> None:
    """Write a file atomically, by way of a file in `beside`, a folder on the same file system, by
    default the file's own. `mode` is subject to the umask."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = (beside or path.parent) / f"tmp{secrets.token_hex(8)}"
    try:
        with open(unfinished, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
