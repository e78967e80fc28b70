"""Checks that this processor can run the worker, before any native library is loaded.

The wheel's own CPU code starts at plain x86-64, but NumPy is compiled for x86-64-v2 (2009 and
later). On an older processor it would end the process with an illegal instruction instead of an
error. Runs on the main thread.
"""

from __future__ import annotations

import ctypes
import platform

from worker.errors import BackendMismatch

_V2 = {"SSE3": 0, "SSSE3": 9, "CMPXCHG16B": 13, "SSE4.1": 19, "SSE4.2": 20, "POPCNT": 23}
"""What x86-64-v2 adds, and its bit in ECX of CPUID leaf 1."""
_LEAF_1, _ECX = 0, 2
"""Indices of glibc's table of CPUID leaves, and of the registers in one of them."""


def check() -> None:
    """Raises `BackendMismatch` if this processor lacks instructions that our libraries use."""
    if lacking := missing():
        raise BackendMismatch(
            f"this processor lacks {', '.join(lacking)}; the worker needs x86-64-v2, "
            "which processors have had since about 2009 (a virtual machine may hide it: "
            "give it the host's CPU model)"
        )


def missing() -> list[str]:
    """The missing instruction sets of x86-64-v2; empty if unknown, as before glibc 2.33."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return []
    leaf_of = getattr(ctypes.CDLL(None), "__x86_get_cpuid_feature_leaf", None)
    if leaf_of is None:
        return []
    leaf_of.restype = ctypes.POINTER(ctypes.c_uint32 * 4)
    ecx = leaf_of(_LEAF_1).contents[_ECX]
    return [name for name, bit in _V2.items() if not ecx >> bit & 1]
