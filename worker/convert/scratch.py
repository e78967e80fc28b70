"""Temporary folders that are removed even if their process was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from worker.errors import of_lock

_PREFIX = ".llorch-convert-"


class Scratch:
    """A new folder inside `parent`, or inside its nearest ancestor that exists; without a parent,
    inside the system's folder for temporary files.

    Its process holds a lock on it, which ends with the process. The next process that makes one in
    the same place removes those that nobody has locked.

    Raises `OSError` if no folder can be made or locked.
    """

    def __init__(self, parent: Path | None) -> None:
        while parent is not None and not parent.is_dir():
            parent = parent.absolute().parent
        parent = parent or _for_temporary_files()
        for other in parent.glob(f"{_PREFIX}*"):
            if (lock := _try_lock(other)) is not None:
                shutil.rmtree(other, ignore_errors=True)
                os.close(lock)
        while (lock := self._new(parent)) is None:
            pass  # Another process took it for an abandoned one.
        self._lock = lock

    def _new(self, parent: Path) -> int | None:
        """Make a folder; returns its lock, or `None` if another process got to it first."""
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        try:
            return locked(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except (BlockingIOError, FileNotFoundError):
            return None
        except OSError as error:
            self.path.rmdir()
            raise OSError(error.errno, error.strerror, str(parent)) from None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def locked(path: Path, flags: int) -> int | None:
    """Open and lock a file or folder; `None` if it was renamed or removed in between.

    Raises:
        OSError: it cannot be opened; a `BlockingIOError`: another process holds the lock.
    """
    file = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        with of_lock():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), path.stat()):
            return file
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def _for_temporary_files() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        why = "no folder for temporary files can be written to; set TMPDIR to one"
        raise OSError(error.errno, why, os.environ.get("TMPDIR", "/tmp")) from None


def _try_lock(folder: Path) -> int | None:
    """Lock a folder; returns its lock, or `None` if it is locked, gone or cannot be opened."""
    try:
        return locked(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
