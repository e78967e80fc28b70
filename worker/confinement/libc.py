"""The system calls that this room needs and Python does not have. Linux only."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38


@cache
def _libc() -> ctypes.CDLL:
    lib = ctypes.CDLL(None, use_errno=True)
    lib.syscall.restype = ctypes.c_long
    return lib


def syscall(number: int, *arguments: Any) -> int:
    """Make a system call by its number; returns its result. Raises `OSError`."""
    whole = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(_libc().syscall(ctypes.c_long(number), *whole))


def set_no_new_privs() -> None:
    """Programs that this thread starts gain no privileges from set-user-ID bits or capabilities."""
    _checked(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def set_not_dumpable() -> None:
    """Exclude this process's memory from core files, and from other processes of its user."""
    _checked(_libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
