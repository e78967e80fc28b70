"""Temporary folders that are removed even if their process was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from worker.errors import of_lock

_PREFIX, _LOCK = ".llorch-scratch-", ".lock"


class Scratch:
    """A new folder inside `parent`, or inside its nearest ancestor that exists; without a parent,
    inside the system's folder for temporary files.

    Its process holds the lock of a file beside it, which ends with the process. (NFS locks no
    folders.) The next process that makes one in the same place removes those that nobody has
    locked.

    Raises `OSError` if no folder can be made or locked.
    """

    def __init__(self, parent: Path | None) -> None:
        while parent is not None and not parent.is_dir():
            parent = parent.absolute().parent
        parent = parent or _for_temporary_files()
        for other in parent.glob(f"{_PREFIX}*{_LOCK}"):
            # It may be locked, gone or another user's.
            with suppress(OSError):
                if (lock := _locked(other)) is not None:
                    _remove(other, lock)
        while (lock := self._new_lock(parent)) is None:
            pass  # Another process took it for an abandoned one.
        self._lock = lock
        self.path = _folder_of(self._file)
        try:
            self.path.mkdir(0o700)
        except OSError:  # such as a disk that is full now
            self.cleanup()
            raise

    def _new_lock(self, parent: Path) -> int | None:
        """Make a file with a lock; `None` if another process got to it first."""
        file, name = tempfile.mkstemp(_LOCK, _PREFIX, parent)
        os.close(file)
        self._file = Path(name)
        try:
            return _locked(self._file)
        except (BlockingIOError, FileNotFoundError):
            return None
        except OSError as error:
            self._file.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(parent)) from None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        _remove(self._file, self._lock)


def _locked(path: Path) -> int | None:
    """Open and lock a file; `None` if it was renamed or removed in between.

    Raises:
        OSError: it cannot be opened; a `BlockingIOError`: another process holds the lock.
    """
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
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


def _folder_of(file: Path) -> Path:
    return file.with_suffix("")


def _remove(file: Path, lock: int) -> None:
    """Remove a folder, and its lock once it is gone: a killed process's child may still write."""
    shutil.rmtree(folder := _folder_of(file), ignore_errors=True)
    if not folder.exists():
        file.unlink(missing_ok=True)
    os.close(lock)
