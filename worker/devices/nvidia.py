"""What NVIDIA's management library (NVML) reports about its cards.

It notices a lost or revoked GPU and reports it in a return code, where CUDA ends the process.
"""

from __future__ import annotations

import ctypes
from functools import cache

from worker.errors import ResidencyViolation

_SUCCESS = 0
_LOST = (15, 16)
"""NVML's codes for "GPU is lost" and "reset required"."""
_UNKNOWN_BYTES = (1 << 64) - 1
_MOST_PROCESSES = 256
_known: set[str] = set()
"""PCI addresses that the library has recognised before; it may never recognise some."""


class _ProcessInfo(ctypes.Structure):
    """`nvmlProcessInfo_v2_t`."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance_id", ctypes.c_uint),
        ("compute_instance_id", ctypes.c_uint),
    ]


def processes(pci_id: str | None) -> dict[int, int]:
    """Bytes in use on this card by process id; empty if the library is absent or lists nothing.
    Processes of unknown size are left out.

    Raises:
        ResidencyViolation: the driver has lost this device.
    """
    if pci_id is None or (nvml := _library()) is None:
        return {}
    handle = ctypes.c_void_p()
    code = nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_id.encode(), ctypes.byref(handle))
    if code != _SUCCESS and pci_id not in _known:
        return {}
    if code != _SUCCESS:
        raise _lost(nvml, code)
    _known.add(pci_id)
    found = (_ProcessInfo * _MOST_PROCESSES)()
    count = ctypes.c_uint(_MOST_PROCESSES)
    code = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found)
    if code in _LOST:
        raise _lost(nvml, code)
    n_known = count.value if code == _SUCCESS else 0
    listed = found[:n_known]
    return {each.pid: each.used_bytes for each in listed if each.used_bytes != _UNKNOWN_BYTES}


def _lost(nvml: ctypes.CDLL, code: int) -> ResidencyViolation:
    reason: bytes = nvml.nvmlErrorString(code)
    return ResidencyViolation(f"The NVIDIA driver has lost the GPU: {reason.decode()}.")


def count() -> int | None:
    """The number of cards; `None` if the library is absent or fails."""
    number = ctypes.c_uint()
    nvml = _library()
    if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)) != _SUCCESS:
        return None
    return number.value


@cache
def _library() -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    nvml.nvmlErrorString.restype = ctypes.c_char_p
    return nvml if nvml.nvmlInit_v2() == _SUCCESS else None
