"""A folder for as long as a process needs it; those of killed processes are cleared away."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = ".llorch-convert-"


class Scratch:
    """A new folder inside the first that exists of `parent` and those above it.

    Its process holds a lock on it, which ends with the process. Whoever makes the next one there
    removes those that nobody holds.
    """

    def __init__(self, parent: Path | None) -> None:
        while parent is not None and not parent.is_dir():
            parent = parent.absolute().parent
        parent = parent or Path(tempfile.gettempdir())
        for other in parent.glob(f"{_PREFIX}*"):
            if (lock := _locked(other)) is not None:
                shutil.rmtree(other, ignore_errors=True)
                os.close(lock)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            if (lock := _locked(self.path)) is not None:  # None: another took it for a left one.
                self._lock = lock
                return

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock; `None` if another holds it, or the folder is gone."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.is_dir():
            return file
    except OSError:
        pass
    os.close(file)
    return None
