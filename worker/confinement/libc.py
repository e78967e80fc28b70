"""The system calls that this room needs, and Python lacks. Linux only."""

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
    """Raises `OSError`."""
    whole = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(_libc().syscall(ctypes.c_long(number), *whole))


def set_no_new_privs() -> None:
    """No program that this thread starts gets rights by its owner or its capabilities."""
    _checked(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def set_not_dumpable() -> None:
    """Memory is written to no core file, and read by no process of the same user."""
    _checked(_libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
