"""Checks that this processor can run the worker, before any native library is loaded.

The wheel's own CPU code starts at plain x86-64, but NumPy is compiled for x86-64-v2 (2009 and
later). On an older processor it would end the process with an illegal instruction instead of an
error. Runs on the main thread.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from pathlib import Path

from worker.errors import BackendMismatch

# The additions of x86-64-v2: each bit in ECX of CPUID leaf 1, and its name in /proc/cpuinfo.
_V2 = {
    "SSE3": (0, "pni"),
    "SSSE3": (9, "ssse3"),
    "CMPXCHG16B": (13, "cx16"),
    "SSE4.1": (19, "sse4_1"),
    "SSE4.2": (20, "sse4_2"),
    "POPCNT": (23, "popcnt"),
}
# unsigned ecx_of_leaf(unsigned leaf):
#   push rbx; mov eax, edi; xor ecx, ecx; cpuid; mov eax, ecx; pop rbx; ret
_ECX_OF_LEAF = bytes.fromhex("53 89f8 31c9 0fa2 89c8 5b c3")


def check() -> None:
    """Raises `BackendMismatch` if this processor lacks instructions that our libraries use."""
    if lacking := missing():
        raise BackendMismatch(
            f"this processor lacks {', '.join(lacking)}; the worker needs x86-64-v2, "
            "which processors have had since about 2009 (a virtual machine may hide it: "
            "give it the host's CPU model)"
        )


def missing() -> list[str]:
    """The instruction sets of x86-64-v2 that are missing; empty if this cannot be determined."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return []
    ecx = _ecx_of_leaf_1()
    if ecx is not None:
        return [name for name, (bit, _) in _V2.items() if not ecx >> bit & 1]
    flags = _cpuinfo_flags()
    return [name for name, (_, flag) in _V2.items() if flags and flag not in flags]


def _ecx_of_leaf_1() -> int | None:
    """ECX of CPUID leaf 1; `None` if a process may not make a page executable."""
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return None
    page.write(_ECX_OF_LEAF)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return int(ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32)(address)(1))


def _cpuinfo_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())
