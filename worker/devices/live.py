"""Live queries: is the device still there, and does it still hold what was put on it?

Runs in the engine process on the thread that answers calls, beside the engine thread, so nothing
here may wait long or touch the context. Native drivers like to end the process when their device
is gone; so what can be asked without them is asked first.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

from worker.devices import rpc_device
from worker.devices.probe import Selected
from worker.errors import BackendMismatch, ResidencyViolation
from worker.llama import library
from worker.messages import Residency

_LEAST_SHARE = 0.9
"""Of the bytes that were put on the device, what it must at least report as in use."""
_SWAPPED_SHARE = 0.05


def check(selected: Selected, residency: Residency, *, locked: bool = False) -> None:
    """
    Raises:
        ResidencyViolation: the device is gone, is another one, or no longer holds the model.
    """
    device = selected.device
    if device is None:
        _check_memory(residency, locked)
        return
    if device.registry == "RPC":
        try:
            rpc_device.check_answers(device.description)
        except BackendMismatch as error:
            raise ResidencyViolation(f"{device.name} is gone: {error.message}") from error
    if device.registry == "CUDA":
        _check_nvml()
    now = next((d for d in library.devices() if d.handle == device.handle), None)
    if now is None or now.total_bytes != device.total_bytes:
        raise ResidencyViolation(f"{device.name} is no longer the device that the model is on.")
    used_bytes = now.total_bytes - now.free_bytes
    # The test device reports a fixed amount of free memory.
    if device.registry != "RPC" and used_bytes < residency.device_bytes * _LEAST_SHARE:
        raise ResidencyViolation(
            f"{device.name} has {used_bytes:,} bytes in use, less than the "
            f"{residency.device_bytes:,} bytes of the model that were put there.",
            used_bytes=used_bytes,
            device_bytes=residency.device_bytes,
        )


def _check_memory(residency: Residency, locked: bool) -> None:
    """For a CPU worker the device is memory: what was swapped out is not in it."""
    if sys.platform != "linux" or not locked:
        return
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmSwap:"):
            swapped_bytes = int(line.split()[1]) * 1024
            if swapped_bytes > residency.device_bytes * _SWAPPED_SHARE:
                raise ResidencyViolation(
                    f"{swapped_bytes:,} bytes of this process were swapped out although memory "
                    "was to be locked.",
                    swapped_bytes=swapped_bytes,
                )


def _check_nvml() -> None:
    """NVIDIA's management library notices a lost or revoked GPU and says so in a return code."""
    nvml = _nvml()
    if nvml is not None and (reason := _nvml_fault(nvml)):
        raise ResidencyViolation(f"The NVIDIA driver has lost the GPU: {reason}.")


@cache
def _nvml() -> ctypes.CDLL | None:
    """`None` where the library is absent or useless from the start; then CUDA itself is asked."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    nvml.nvmlErrorString.restype = ctypes.c_char_p
    return nvml if nvml.nvmlInit_v2() == 0 and not _nvml_fault(nvml) else None


def _nvml_fault(nvml: ctypes.CDLL) -> str | None:
    """Why not all of the visible GPUs answer; `None` when they do."""
    count, handle = ctypes.c_uint(), ctypes.c_void_p()
    code = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value if code == 0 else 0):
        code = code or nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    if code != 0:
        reason: bytes = nvml.nvmlErrorString(code)
        return reason.decode()
    return None if count.value else "no GPU is visible any more"
