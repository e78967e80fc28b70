"""Linux's Landlock: from some moment on, the calling thread opens only files that it has named.

Threads that are there already are not bound. What a kernel's version of it lacks is left out. Its
package on PyPI has never been released, and it takes three system calls.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable

from worker.confinement.libc import set_no_new_privs, syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION, _PATH_BENEATH = 1, 1

WRITE_FILE, _READ_FILE, _READ_DIR, TRUNCATE, _IOCTL_DEV = (1 << bit for bit in (1, 2, 3, 14, 15))
_REMOVE_FILE, _MAKE_REG, _MAKE_DIR = 1 << 5, 1 << 8, 1 << 7
_FILE_RIGHTS_SINCE = {1: (1 << 13) - 1, 2: 1 << 13, 3: TRUNCATE, 5: _IOCTL_DEV}
_TCP_SINCE, _TCP = 4, 0b11
"""To listen, and to connect."""
_SCOPES_SINCE, _SCOPES = 6, 0b11
"""Abstract Unix sockets and signals of processes outside."""

READ = _READ_FILE | _READ_DIR
WRITE = READ | WRITE_FILE | TRUNCATE | _REMOVE_FILE | _MAKE_REG | _MAKE_DIR
DEVICE = READ | WRITE_FILE | _IOCTL_DEV
_OF_A_FILE = _READ_FILE | WRITE_FILE | TRUNCATE | _IOCTL_DEV
"""The rights that a rule for something other than a folder may have."""


class _Attributes(ctypes.Structure):
    """`landlock_ruleset_attr`."""

    _fields_ = [("files", ctypes.c_uint64), ("tcp", ctypes.c_uint64), ("scopes", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    """`landlock_path_beneath_attr`."""

    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def restrict(rules: Iterable[tuple[str, int]]) -> int:
    """Allow what the rules allow (a path and the rights on it and below it), and nothing else.

    Paths that are not there are passed over. Returns the version of the kernel's Landlock. Raises
    `OSError` if it has none, or does not let this process use it.
    """
    version = syscall(_CREATE_RULESET, None, 0, _ASK_VERSION)
    handled = sum(rights for since, rights in _FILE_RIGHTS_SINCE.items() if version >= since)
    tcp = _TCP if version >= _TCP_SINCE else 0
    attributes = _Attributes(handled, tcp, _SCOPES if version >= _SCOPES_SINCE else 0)
    ruleset = syscall(_CREATE_RULESET, ctypes.byref(attributes), ctypes.sizeof(attributes), 0)
    try:
        for path, rights in rules:
            _allow(ruleset, path, rights & handled)
        set_no_new_privs()
        syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return version


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        rights &= _OF_A_FILE
    rule = _PathBeneath(rights, place)
    syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    if not path.startswith("/proc/"):  # short of memory, the kernel makes these anew if not in use
        os.close(place)
