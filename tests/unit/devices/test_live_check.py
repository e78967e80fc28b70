"""Live queries, with devices and drivers in states that this machine's cannot have."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worker import setting_files
from worker.devices import machine, nvidia
from worker.devices.residency import live_check
from worker.devices.select import Card, Selected
from worker.errors import ResidencyViolation
from worker.llama import library
from worker.wire.engine_info import Buffer, Residency

GIB = 1 << 30
HELD = Residency(
    resident=True,
    device="CUDA0",
    buffers=(Buffer("weights", "CUDA0", 4 * GIB), Buffer("kv", "CUDA0", 2 * GIB)),
    layers_total=5,
    layers_on_device=5,
)


GPU = library.Device("CUDA0", "NVIDIA H100", "gpu", "CUDA", 4711)
OTHER = replace(GPU, name="CUDA1", handle=4712)
CARD = "0000:c1:00.0"
SELECTED = Selected((Card(GPU, 80 * GIB, CARD),))


class Nvml:
    """The used functions of the management library, with chosen answers."""

    def __init__(self, code: int = 0, processes: dict[int, int] | None = None) -> None:
        self.code, self.processes = code, processes or {}

    def nvmlDeviceGetHandleByPciBusId_v2(self, pci_id: bytes, _handle: object) -> int:
        assert pci_id == CARD.encode(), "another card is asked"
        return self.code

    def nvmlDeviceGetComputeRunningProcesses_v3(
        self, _handle: object, count: Any, found: Any
    ) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = len(self.processes)
        for entry, (pid, used_bytes) in zip(found, self.processes.items(), strict=False):
            entry.pid, entry.used_bytes = pid, used_bytes
        return self.code

    def nvmlErrorString(self, _code: int) -> bytes:
        return b"GPU is lost"


Check = Callable[..., None]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Check `HELD` against the current devices and driver."""

    def run(
        free_bytes: int,
        *now: library.Device,
        nvml: Nvml | None = None,
        held: Residency | None = None,
    ) -> None:
        def properties_of(device: library.Device) -> library.DeviceProperties:
            assert device == GPU, "another card is asked"
            assert nvml is None or nvml.code == 0, "a lost card would end the process"
            return library.DeviceProperties(free_bytes, 80 * GIB, CARD)

        monkeypatch.setattr(library, "devices", lambda: list(now) or [GPU, OTHER])
        monkeypatch.setattr(library, "properties_of", properties_of)
        monkeypatch.setattr(nvidia, "_library", lambda: nvml)
        monkeypatch.setattr(nvidia, "_known", {CARD})
        live_check.check(SELECTED, held or HELD)

    return run


def test_a_device_that_holds_the_model_passes(check: Check) -> None:
    check(70 * GIB, nvml=Nvml())
    assert HELD.device_bytes == 6 * GIB


def test_a_device_with_less_in_use_than_the_model_takes_is_a_loss(check: Check) -> None:
    with pytest.raises(ResidencyViolation, match="less than the 6,442,450,944 bytes") as caught:
        check(79 * GIB)
    assert caught.value.details["used_bytes"] == GIB


def test_a_device_that_left_the_registry_is_a_loss(check: Check) -> None:
    with pytest.raises(ResidencyViolation, match="no longer the device"):
        check(70 * GIB, OTHER)


def test_a_gpu_that_the_driver_lost_is_a_loss(check: Check) -> None:
    with pytest.raises(ResidencyViolation, match="GPU is lost"):
        check(70 * GIB, nvml=Nvml(15))


def test_the_memory_of_another_process_does_not_count(check: Check) -> None:
    others = {os.getpid() + 1: 40 * GIB}
    check(30 * GIB, nvml=Nvml(0, {os.getpid(): 7 * GIB, **others}))
    with pytest.raises(ResidencyViolation, match="bytes in use by this worker, less than"):
        check(30 * GIB, nvml=Nvml(0, {os.getpid(): GIB, **others}))


def test_a_driver_that_does_not_know_this_process_counts_the_whole_device(check: Check) -> None:
    check(70 * GIB, nvml=Nvml(0, {os.getpid() + 1: 40 * GIB}))
    check(70 * GIB, nvml=Nvml(0, {os.getpid(): (1 << 64) - 1}))


def test_the_memory_of_another_process_does_not_count_with_the_hosts_process_ids(
    check: Check,
) -> None:
    """As in a container, where the driver lists the host's process ids."""
    own, other, later = (os.getpid() + n for n in (1, 2, 3))
    at_load = Nvml(0, {own: 7 * GIB, other: GIB})
    check(70 * GIB, nvml=at_load)
    held = replace(HELD, holder_pids=live_check.holders(SELECTED, HELD))
    assert held.holder_pids == (own,)
    check(30 * GIB, nvml=Nvml(0, {own: 7 * GIB, later: 40 * GIB}), held=held)
    with pytest.raises(ResidencyViolation, match="by this worker, less than"):
        check(30 * GIB, nvml=Nvml(0, {later: 40 * GIB}), held=held)
    check(70 * GIB, nvml=Nvml(), held=held)


def test_a_vulkan_device_without_a_memory_budget_is_watched_only_for_presence(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    vulkan = Selected((Card(replace(GPU, registry="Vulkan"), 80 * GIB),))
    for free_bytes, tells in ((80 * GIB, False), (70 * GIB, True)):
        memory = library.DeviceProperties(free_bytes, 80 * GIB)
        monkeypatch.setattr(library, "properties_of", lambda _device, memory=memory: memory)
        assert live_check.watch(vulkan, HELD).watched == ("device" if tells else "presence")
    check(80 * GIB, held=replace(HELD, watched="presence"))
    with pytest.raises(ResidencyViolation, match="has 0 bytes in use"):
        check(80 * GIB)


def test_a_process_that_the_driver_lists_has_no_other_holders(check: Check) -> None:
    check(70 * GIB, nvml=Nvml(0, {os.getpid(): 7 * GIB, os.getpid() + 1: 40 * GIB}))
    assert live_check.holders(SELECTED, HELD) == ()
    assert live_check.watch(SELECTED, HELD).watched == "process"


def test_an_earlier_worker_on_the_card_does_not_count_as_this_one(check: Check) -> None:
    earlier, own = os.getpid() + 1, os.getpid() + 2
    check(60 * GIB, nvml=Nvml(0, {earlier: 8 * GIB, own: 7 * GIB}))
    before = {earlier: 8 * GIB, own: GIB >> 2}
    selected = Selected((Card(GPU, 80 * GIB, CARD, before),))
    held = live_check.watch(selected, HELD)
    assert (held.holder_pids, held.watched) == ((own,), "process")
    with pytest.raises(ResidencyViolation, match="in use by this worker"):
        check(70 * GIB, nvml=Nvml(0, {earlier: 8 * GIB}), held=held)


def test_if_the_driver_lists_no_process_the_whole_device_is_watched(check: Check) -> None:
    check(70 * GIB, nvml=Nvml())  # as in a MIG instance, or without permission
    assert live_check.watch(SELECTED, HELD).watched == "device"


def test_memory_of_a_cpu_worker_is_checked_only_if_it_must_be_locked() -> None:
    held = replace(HELD, device="CPU", buffers=(Buffer("weights", "CPU", 1),))
    live_check.check(Selected(), held, locked=False)
    live_check.check(Selected(), replace(held, buffers=HELD.buffers), locked=True)


def test_the_version_of_the_nvidia_driver_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "proc/driver/nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\nGCC version: 12\n"
    )
    assert machine.driver_versions(tmp_path)["nvidia"] == "580.95.05"


def test_the_model_and_the_features_of_the_cpu_are_read(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC 9B14\n")
    assert machine.cpu_model(tmp_path) == "AMD EPYC 9B14"
    assert machine.cpu_features("CPU : SSE3 = 1 | AVX512 = 0 | FMA = 1 | ") == ["SSE3", "FMA"]


@pytest.mark.parametrize(
    ("now", "is_lost"),
    [((7, 1, 1, 4), False), ((7, 1, 9, 5), True), ((7, 2, 1, 5), False), ((8, 1, 9, 5), False)],
    ids=["the same", "written to", "of another number", "of another file system"],
)
def test_a_file_is_lost_if_it_is_modified_but_not_if_it_is_replaced(
    now: tuple[int, ...], is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems have the same inode numbers, and a link may point to one file after another."""
    names = ("st_dev", "st_ino", "st_size", "st_mtime_ns")
    stats = [SimpleNamespace(**dict(zip(names, each, strict=True))) for each in (now, (7, 1, 1, 4))]
    monkeypatch.setattr(setting_files, "os", SimpleNamespace(stat=lambda _: stats.pop()))
    held = live_check.MappedFiles([Path("m.gguf")])
    if is_lost:
        with pytest.raises(ResidencyViolation, match="m.gguf was written to"):
            held.check()
    else:
        held.check()
