"""Marks the files that a running worker serves, so that they are not evicted from the cache.

An engine that crashed starts again from the same file, which must still be there. The mark is a
shared `flock` on the file itself, so it ends with its process in any case.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import BinaryIO


def hold(path: Path) -> BinaryIO | None:
    """The file, marked until it is closed; `None` if the file system has no such locks."""
    file = path.open("rb")
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def is_held(path: Path) -> bool:
    """Whether any process has marked the file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False  # no locks here, so no process has one
    return False
