"""The cache outside the checkout, shared by checkouts: `${XDG_CACHE_HOME:-~/.cache}/llorch-worker`.

Whatever has its final name is complete: it is made under a temporary name and renamed into place,
under a lock.
"""

import ast
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from builds.errors import BuildError

SUMS = "SHA256SUMS"


def folder(*parts: str) -> Path:
    """A folder of the cache; created if it is missing.

    Raises `BuildError` if it cannot be.
    """
    # Of a user whom the system does not know, `~` stays as it is; `worker.installation` and
    # container runtimes have `/` for that.
    home = os.path.expanduser("~")
    base = os.environ.get("XDG_CACHE_HOME") or Path("/" if home == "~" else home, ".cache")
    path = Path(base, "llorch-worker", *parts)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"{path} cannot be made: {error.strerror}; set XDG_CACHE_HOME") from None
    return path


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Hold the machine-wide lock `name`; prints a line if it has to wait."""
    path = folder("locks") / f"{name}.lock"
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is working on {name}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give an empty folder that replaces `target` if the block succeeds, and is removed
    otherwise."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed run; the caller holds the lock
    partial.mkdir(parents=True)
    try:
        yield partial
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def seal(home: Path) -> None:
    """Write SHA256SUMS for the files of a folder, in the form that `sha256sum -c` reads."""
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(home.iterdir()) if path.is_file()]
    (home / SUMS).write_text("".join(lines))


def is_whole(home: Path) -> bool:
    """Whether a sealed folder exists and its files agree with SHA256SUMS."""
    try:
        listed = [line.split() for line in (home / SUMS).read_text().splitlines()]
        return all(sha256(home / name) == digest for digest, name in listed) and bool(listed)
    except FileNotFoundError:
        return False
    except ValueError as error:
        raise BuildError(f"{home}/{SUMS} is damaged; remove {home} and run this again.") from error


def key(inputs: Any) -> str:
    """A short hash of everything that a thing in the cache was made from."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def code_hash(*files: Path) -> str:
    """A hash of these Python files that comments and formatting do not change; docstrings do."""
    trees = [ast.dump(ast.parse(file.read_text("utf-8"))) for file in files]
    return key(trees)


def say(line: str) -> None:
    """Print progress to stderr, because scripts read the results on stdout."""
    print(f"builds: {line}", file=sys.stderr, flush=True)
