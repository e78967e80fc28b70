"""Live queries: devices and drivers in states that this machine's are not in."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from worker.devices import driver, live
from worker.devices.probe import Selected
from worker.errors import ResidencyViolation
from worker.llama import library
from worker.messages import Buffer, Residency

GIB = 1 << 30
HELD = Residency(
    resident=True,
    device="CUDA0",
    buffers=(Buffer("weights", "CUDA0", 4 * GIB), Buffer("kv", "CUDA0", 2 * GIB)),
    layers_total=5,
    layers_on_device=5,
)


def gpu(free_bytes: int) -> library.Device:
    return library.Device(1, "CUDA0", "NVIDIA H100", "gpu", "CUDA", free_bytes, 80 * GIB, 4711)


class Nvml:
    """The few functions of the management library, with a chosen answer."""

    def __init__(self, code: int, n_devices: int = 1) -> None:
        self.code, self.n_devices = code, n_devices

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = self.n_devices
        return self.code

    def nvmlDeviceGetHandleByIndex_v2(self, _index: int, _handle: object) -> int:
        return self.code

    def nvmlErrorString(self, _code: int) -> bytes:
        return b"GPU is lost"


Check = Callable[..., None]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Check `HELD` against the devices and the driver of the moment."""

    def run(*now: library.Device, nvml: Nvml | None = None) -> None:
        monkeypatch.setattr(library, "devices", lambda: list(now))
        monkeypatch.setattr(live, "_nvml", lambda: nvml)
        live.check(Selected(gpu(80 * GIB), "CUDA0", None), HELD)

    return run


def test_a_device_that_holds_the_model_passes(check: Check) -> None:
    check(gpu(70 * GIB), nvml=Nvml(0))
    assert HELD.device_bytes == 6 * GIB


def test_a_device_with_less_in_use_than_the_model_takes_is_a_loss(check: Check) -> None:
    with pytest.raises(ResidencyViolation, match="less than the 6,442,450,944 bytes") as caught:
        check(gpu(79 * GIB))
    assert caught.value.details["used_bytes"] == GIB


def test_a_device_that_left_the_registry_is_a_loss(check: Check) -> None:
    with pytest.raises(ResidencyViolation, match="no longer the device"):
        check(replace(gpu(70 * GIB), handle=1))


def test_a_gpu_that_the_driver_lost_is_a_loss(check: Check) -> None:
    with pytest.raises(ResidencyViolation, match="GPU is lost"):
        check(gpu(70 * GIB), nvml=Nvml(15))


def test_a_container_whose_gpu_was_taken_away_is_a_loss(check: Check) -> None:
    with pytest.raises(ResidencyViolation, match="no GPU is visible any more"):
        check(gpu(70 * GIB), nvml=Nvml(0, n_devices=0))


def test_memory_of_a_cpu_worker_is_only_looked_at_when_it_was_to_be_locked() -> None:
    held = replace(HELD, device="CPU", buffers=(Buffer("weights", "CPU", 1),))
    live.check(Selected(None, "CPU", None), held, locked=False)
    live.check(Selected(None, "CPU", None), replace(held, buffers=HELD.buffers), locked=True)


def test_the_nvidia_driver_tells_its_version(tmp_path: Path) -> None:
    folder = tmp_path / "proc/driver/nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\nGCC version: 12\n"
    )
    assert driver.version(tmp_path)["nvidia"] == "580.95.05"


def test_the_cpu_tells_its_model_and_features(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC 9B14\n")
    assert driver.cpu_model(tmp_path) == "AMD EPYC 9B14"
    assert driver.cpu_features("CPU : SSE3 = 1 | AVX512 = 0 | FMA = 1 | ") == ["SSE3", "FMA"]
