"""Checks that the device is still there and still holds what this process put on it.

Asks only the selected device. Runs on the engine process's intake thread while the engine thread
works, so nothing here may wait long or use the context. Native drivers tend to end the process when
their device is gone, so other sources are asked first.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

from worker.devices.select import Selected
from worker.errors import ResidencyViolation
from worker.llama import library
from worker.wire.engine_info import Residency

_LEAST_SHARE = 0.9
"""The share of the model's bytes on the device that must be in use there."""
_SWAPPED_SHARE = 0.05
_NVML_SUCCESS = 0
_NVML_LOST = (15, 16)
"""NVML's codes for "GPU is lost" and "reset required"."""
_UNKNOWN_BYTES = (1 << 64) - 1
_MOST_PROCESSES = 256


def check(selected: Selected, residency: Residency, *, locked: bool = False) -> None:
    """Raises `ResidencyViolation` if the device is gone, another, or without the model."""
    device = selected.device
    if device is None:
        _check_memory(residency, locked)
        return
    own_bytes = _own_bytes(_nvidia_processes(selected.pci_id), residency.holder_pids)
    is_there = any(known.handle == device.handle for known in library.devices())
    memory = library.properties_of(device) if is_there else None
    if memory is None or memory.total_bytes != selected.total_bytes:
        raise ResidencyViolation(f"{device.name} is no longer the device that the model is on.")
    used_bytes = memory.total_bytes - memory.free_bytes if own_bytes is None else own_bytes
    if own_bytes is None and not residency.device_tells_use:
        return
    if used_bytes < residency.device_bytes * _LEAST_SHARE:
        whose = "in use" if own_bytes is None else "in use by this worker"
        raise ResidencyViolation(
            f"{device.name} has {used_bytes:,} bytes {whose}, less than the "
            f"{residency.device_bytes:,} bytes of the model that were put there.",
            used_bytes=used_bytes,
            device_bytes=residency.device_bytes,
        )


def tells_use(selected: Selected) -> bool:
    """Whether the device, right after a load, tells that memory is in use.

    A Vulkan driver without `VK_EXT_memory_budget` never does: all of its memory is then free. That
    such a device still holds the model cannot be asked.
    """
    device = selected.device
    if device is None or device.registry != "Vulkan":
        return True
    memory = library.properties_of(device)
    return memory.free_bytes < memory.total_bytes


def _check_memory(residency: Residency, locked: bool) -> None:
    """Check a CPU worker's locked memory: nothing of it may be swapped out."""
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


class _ProcessInfo(ctypes.Structure):
    """`nvmlProcessInfo_v2_t`."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance_id", ctypes.c_uint),
        ("compute_instance_id", ctypes.c_uint),
    ]


def holders(selected: Selected, residency: Residency) -> tuple[int, ...]:
    """Processes that may be this one, if the driver uses other process ids than this system.

    In a container with its own process ids, the driver lists the host's. Right after the load, one
    of the processes with enough bytes there is this one; no later one can be mistaken for it.
    """
    processes = _nvidia_processes(selected.pci_id)
    if os.getpid() in processes:
        return ()
    least_bytes = residency.device_bytes * _LEAST_SHARE
    return tuple(sorted(pid for pid, used in processes.items() if used >= least_bytes))


def _own_bytes(processes: dict[int, int], holder_pids: tuple[int, ...]) -> int | None:
    """This process's bytes on the device; `None` if the driver's list does not tell."""
    if os.getpid() in processes:
        return processes[os.getpid()]
    if not processes or not holder_pids:
        return None
    return max(processes.get(pid, 0) for pid in holder_pids)


def _nvidia_processes(pci_id: str | None) -> dict[int, int]:
    """The bytes of each process on this card, from NVIDIA's management library.

    The library notices a lost or revoked GPU and reports it in a return code. The result is empty
    if the library is absent or lists nothing; processes of unknown size are left out.

    Raises:
        ResidencyViolation: the driver has lost this device.
    """
    if pci_id is None or (nvml := _nvml(pci_id)) is None:
        return {}
    handle = ctypes.c_void_p()
    code = nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_id.encode(), ctypes.byref(handle))
    if code != _NVML_SUCCESS:
        raise _lost(nvml, code)
    processes = (_ProcessInfo * _MOST_PROCESSES)()
    count = ctypes.c_uint(_MOST_PROCESSES)
    code = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), processes)
    if code in _NVML_LOST:
        raise _lost(nvml, code)
    n_known = count.value if code == _NVML_SUCCESS else 0
    listed = processes[:n_known]
    return {each.pid: each.used_bytes for each in listed if each.used_bytes != _UNKNOWN_BYTES}


def _lost(nvml: ctypes.CDLL, code: int) -> ResidencyViolation:
    reason: bytes = nvml.nvmlErrorString(code)
    return ResidencyViolation(f"The NVIDIA driver has lost the GPU: {reason.decode()}.")


@cache
def _nvml(pci_id: str) -> ctypes.CDLL | None:
    """The management library; `None` if it is absent or did not know the device at first."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    nvml.nvmlErrorString.restype = ctypes.c_char_p
    handle = ctypes.c_void_p()
    if nvml.nvmlInit_v2() != _NVML_SUCCESS:
        return None
    code = nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_id.encode(), ctypes.byref(handle))
    return nvml if code == _NVML_SUCCESS else None
