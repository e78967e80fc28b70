"""The versions of the GPU driver and the CPU's name and features.

Reads files and the driver's library, without the native wheel; runs anywhere.
"""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path

from worker.devices.cpu.budget import CpuBudget
from worker.devices.cpu.cgroups import read

_GIB = 1 << 30
_NVIDIA_VERSION = re.compile(r"\b(\d+\.\d+(?:\.\d+)?)\b")


def driver_versions(root: Path = Path("/")) -> dict[str, str]:
    """The versions of the NVIDIA driver and of its CUDA; empty without such a driver."""
    found = {}
    first, _, _ = read(root / "proc/driver/nvidia/version").partition("\n")
    if match := _NVIDIA_VERSION.search(first):
        found["nvidia"] = match[1]
    if cuda := _cuda_version():
        found["cuda"] = cuda
    return found


def _cuda_version() -> str | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def cpu_features(system_info: str) -> list[str]:
    """The instruction sets in llama.cpp's line `CPU : SSE3 = 1 | AVX = 1 | …`."""
    return re.findall(r"(\w+) = 1", system_info)


def findings(budget: CpuBudget) -> dict[str, str]:
    """What `doctor` and a worker's `/info` say about this machine, keyed by doctor's checks."""
    limit = budget.memory_limit_bytes
    available = f"{budget.memory_available_bytes / _GIB:.1f} GiB available"
    return {
        "machine": f"{platform.platform()}, {cpu_model()}",
        "threads": budget.derivation,
        "memory": f"{available} ({budget.memory_derivation}), "
        + (f"limit {limit / _GIB:.1f} GiB" if limit else "no limit set"),
    }


def cpu_model(root: Path = Path("/")) -> str:
    lines = read(root / "proc/cpuinfo").splitlines()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return ("" if lines else platform.processor()) or platform.machine()
