"""Linux's Landlock: after `restrict`, the calling thread can open only the paths that it allowed.

Other threads that exist by then are not bound. Rights that the kernel's version does not know are
left out. The package on PyPI has only pre-releases, and three system calls are all it takes.
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
"""Binding and connecting TCP sockets."""
_SCOPES_SINCE, _SCOPES = 6, 0b11
"""Connecting to abstract Unix sockets, and sending signals, outside this domain."""

READ = _READ_FILE | _READ_DIR
WRITE = READ | WRITE_FILE | TRUNCATE | _REMOVE_FILE | _MAKE_REG | _MAKE_DIR
DEVICE = READ | WRITE_FILE | _IOCTL_DEV
_OF_A_FILE = _READ_FILE | WRITE_FILE | TRUNCATE | _IOCTL_DEV
"""The rights that a rule may have on anything that is not a folder."""


class _Attributes(ctypes.Structure):
    """`landlock_ruleset_attr`."""

    _fields_ = [("files", ctypes.c_uint64), ("tcp", ctypes.c_uint64), ("scopes", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    """`landlock_path_beneath_attr`."""

    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def restrict(rules: Iterable[tuple[str, int]]) -> int:
    """Allow only what the rules name: paths, each with the rights on it and everything below it.

    Paths that cannot be opened are skipped. Returns the version of the kernel's Landlock. Raises
    `OSError` if the kernel has none, or does not let this process use it.
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
    # Under memory pressure the kernel replaces unused inodes of /proc by ones without rules.
    if not path.startswith("/proc/"):
        os.close(place)
