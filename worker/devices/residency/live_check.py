"""Checks that the device is still there and still holds what this process put on it.

Asks only the selected devices. Runs on the engine process's intake thread while the engine thread
works, so nothing here may wait long or use the context. Native drivers tend to end the process when
their device is gone, so other sources are asked first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from worker.devices import nvidia
from worker.devices.select import Card, Selected
from worker.errors import ResidencyViolation
from worker.llama import library
from worker.setting_files import version_of
from worker.wire.engine_info import Residency

_LEAST_SHARE = 0.9
"""The share of the model's bytes on the device that must be in use there."""
_SWAPPED_SHARE = 0.05


def check(selected: Selected, residency: Residency, *, locked: bool = False) -> None:
    """Raises `ResidencyViolation` if the device is gone, is another one, or lacks the model."""
    if not selected.is_gpu:
        _check_memory(residency, locked)
    for card in selected.cards:
        _check_card(card, residency)


def _check_card(card: Card, residency: Residency) -> None:
    device = card.device
    own_bytes = _own_bytes(nvidia.processes(card.pci_id), residency.holder_pids)
    is_there = any(known.handle == device.handle for known in library.devices())
    memory = library.properties_of(device) if is_there else None
    if memory is None or memory.total_bytes != card.total_bytes:
        raise ResidencyViolation(f"{device.name} is no longer the device that the model is on.")
    used_bytes = memory.total_bytes - memory.free_bytes if own_bytes is None else own_bytes
    if own_bytes is None and residency.watched == "presence":
        return
    held_bytes = residency.bytes_on(device.name)
    if used_bytes < held_bytes * _LEAST_SHARE:
        whose = "in use" if own_bytes is None else "in use by this worker"
        raise ResidencyViolation(
            f"{device.name} has {used_bytes:,} bytes {whose}, less than the "
            f"{held_bytes:,} bytes of the model that were put there.",
            used_bytes=used_bytes,
            device_bytes=held_bytes,
        )


def watch(selected: Selected, residency: Residency) -> Residency:
    """Record, right after the load, what can be checked later.

    NVIDIA's library lists no processes in a MIG instance or without permission: then the memory in
    use on the device is watched. A Vulkan driver without `VK_EXT_memory_budget` reports none in
    use: then only the device's presence is.
    """
    pids = holders(selected, residency)
    listed = (os.getpid() in nvidia.processes(card.pci_id) for card in selected.cards)
    if pids or (selected.is_gpu and all(listed)):
        return replace(residency, watched="process", holder_pids=pids)
    is_blind = any(_reports_no_use(card.device) for card in selected.cards)
    return replace(residency, watched="presence" if is_blind else "device")


def _reports_no_use(device: library.Device) -> bool:
    memory = library.properties_of(device)
    return device.registry == "Vulkan" and memory.free_bytes == memory.total_bytes


def _check_memory(residency: Residency, locked: bool) -> None:
    """Check that a CPU worker's locked memory is not swapped out."""
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


def holders(selected: Selected, residency: Residency) -> tuple[int, ...]:
    """Processes that may be this one, if the driver uses other process ids than this system.

    In a container with its own process ids, the driver lists the host's. Right after the load, one
    of the processes that have taken enough bytes since the selection is this one; no earlier or
    later one can be mistaken for it.
    """
    found: list[set[int]] = []
    for card in selected.cards:
        processes = nvidia.processes(card.pci_id)
        if os.getpid() in processes:
            return ()
        least_bytes = residency.bytes_on(card.device.name) * _LEAST_SHARE
        taken = {pid: used - card.used_before.get(pid, 0) for pid, used in processes.items()}
        found.append({pid for pid, more in taken.items() if more >= least_bytes})
    return tuple(sorted(set.intersection(*found))) if found else ()


def _own_bytes(processes: dict[int, int], holder_pids: tuple[int, ...]) -> int | None:
    """This process's bytes on the device; `None` if the driver's list does not have them."""
    if os.getpid() in processes:
        return processes[os.getpid()]
    if not processes or not holder_pids:
        return None
    return max(processes.get(pid, 0) for pid in holder_pids)


class MappedFiles:
    """Files whose pages are the model's memory, in their present versions: what is written to them
    changes the weights. A file that is replaced by another stays mapped unchanged."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._known = {path: version_of(path) for path in paths}

    def check(self) -> None:
        """Raises `ResidencyViolation` if one was written to."""
        for path, known in self._known.items():
            now = version_of(path)
            # A file that was removed, or cannot be read for now, proves nothing.
            is_same_file = known and now and known[-1] == now[-1]
            if is_same_file and known != now:
                raise ResidencyViolation(
                    f"{path.name} was written to while it was served: the model is no longer the "
                    "one that was loaded. Start the worker again, and replace a model's file by "
                    "renaming another one to its name."
                )
