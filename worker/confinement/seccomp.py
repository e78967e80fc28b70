"""Linux's seccomp: after `restrict`, the process can no longer make certain system calls.

A filter is a BPF program that the kernel runs for each call. Python's libraries for it need
libseccomp, which not every machine has; this filter is just a list of comparisons. A refused call
fails with EPERM, so that a library that merely tries it continues.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Mapping
from typing import NamedTuple

from worker.confinement.libc import set_no_new_privs, syscall


class Machine(NamedTuple):
    audit: int
    """The value of `seccomp_data.arch`."""
    seccomp: int
    """The number of the system call `seccomp`."""


MACHINES = {"x86_64": Machine(0xC000003E, 317), "aarch64": Machine(0xC00000B7, 277)}
_SET_MODE_FILTER = 1
_ALL_THREADS, _KEEP_SPECULATION = 1, 4
"""Without the second flag, kernels before 5.16 slow the whole process down."""

_BYTES = 8
"""Size of an instruction."""
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24
"""Offsets in `seccomp_data`: the call, the architecture, the low words of two arguments."""
_KILL, _ALLOW, _ERROR = 0x80000000, 0x7FFF0000, 0x00050000
_X32 = 0x40000000
"""Numbers from here on are the same calls in the x32 ABI."""
_CLONE_THREAD = 0x10000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
"""The requests of `ioctl` that inject input into a terminal."""

REFUSED: Mapping[str, tuple[int, int | None]] = {
    # New connections.
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    # Other programs.
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "tkill": (200, 130),
    # Ways around this filter, and the kernel's most vulnerable parts.
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "personality": (135, 92),
    # The machine itself, where this process runs as root.
    "mount": (165, 40),
    "umount2": (166, 39),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "unshare": (272, 97),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "iopl": (172, None),
    "ioperm": (173, None),
    "syslog": (103, 116),
    "fanotify_init": (300, 262),
}
"""Calls that are always refused, with their numbers in the order of `MACHINES`."""
DECIDED: Mapping[str, tuple[int, int]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
    "ioctl": (16, 29),
}
"""Calls that are refused by their arguments: `clone` may start threads but no processes, signals
and limits reach only this process, and no `ioctl` injects input into a terminal."""


def restrict() -> None:
    """Bind all current and future threads of this process.

    Raises `OSError` if the kernel has no seccomp, or does not let this process use it.
    """
    machine = platform.machine()
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"the system calls of {machine} are not known")
    code = filter_program(machine, os.getpid())
    kept = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // _BYTES, ctypes.addressof(kept))  # `sock_fprog`
    set_no_new_privs()
    number, flags = MACHINES[machine].seccomp, _ALL_THREADS | _KEEP_SPECULATION
    if thread := syscall(number, _SET_MODE_FILTER, flags, program):
        raise OSError(errno.EBUSY, f"thread {thread} has another filter")


def filter_program(machine: str, pid: int) -> bytes:
    """The filter for process `pid`, as instructions of eight bytes each."""
    known = MACHINES[machine]
    own, refuse = (_EQUAL, pid), _ERROR | errno.EPERM
    column = list(MACHINES).index(machine)

    def about(
        call: str, argument: int, *comparisons: tuple[int, int], then: int, otherwise: int
    ) -> list[bytes]:
        """For one call, return `then` if a comparison of the argument holds, else `otherwise`."""
        inner = [_instruction(_LOAD, argument)]
        for comparison, value in comparisons:
            inner += _return_if(comparison, value, then)
        inner.append(_instruction(_RETURN, otherwise))
        return [_instruction(_EQUAL, DECIDED[call][column], 0, len(inner)), *inner]

    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, known.audit, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
        *_return_if(_AT_LEAST, _X32, refuse),
        *_return_if(_EQUAL, DECIDED["clone3"][column], _ERROR | errno.ENOSYS),  # libc tries clone
    ]
    for numbers in REFUSED.values():
        if (number := numbers[column]) is not None:
            code += _return_if(_EQUAL, number, refuse)
    thread = (_ANY_BIT, _CLONE_THREAD)
    types = ((_EQUAL, _TIOCSTI), (_EQUAL, _TIOCLINUX))
    code += [
        *about("clone", _FIRST, thread, then=_ALLOW, otherwise=refuse),
        *about("kill", _FIRST, own, then=_ALLOW, otherwise=refuse),
        *about("tgkill", _FIRST, own, then=_ALLOW, otherwise=refuse),
        *about("prlimit64", _FIRST, (_EQUAL, 0), own, then=_ALLOW, otherwise=refuse),
        *about("ioctl", _SECOND, *types, then=refuse, otherwise=_ALLOW),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _return_if(comparison: int, value: int, answer: int) -> list[bytes]:
    """Return `answer` if the comparison holds, else continue."""
    return [_instruction(comparison, value, 0, 1), _instruction(_RETURN, answer)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction; jumps count the instructions to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
