"""What the machine says about its GPU driver and its CPU, in versions a person can compare.

Plain reading, no native wheel; runs anywhere.
"""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path

_NVIDIA_VERSION = re.compile(r"\b(\d+\.\d+(?:\.\d+)?)\b")


def driver_versions(root: Path = Path("/")) -> dict[str, str]:
    """Kernel driver and the CUDA release that it speaks; empty without an NVIDIA driver."""
    found = {}
    try:
        text = (root / "proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        text = ""
    if match := _NVIDIA_VERSION.search(text):
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
    """The instruction sets of llama.cpp's `CPU : SSE3 = 1 | AVX = 1 | …` line."""
    return re.findall(r"(\w+) = 1", system_info)


def cpu_model(root: Path = Path("/")) -> str:
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()
