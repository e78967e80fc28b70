"""The CPU budget: how many threads compute, and how much memory the host grants.

Reads control groups, the affinity mask and the core topology, in any process and without native
code. Threads beyond the budget would delay all others at every barrier of a compute graph.
"""

from __future__ import annotations

import math
import os
import re
import resource
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from worker.devices.cpu.cgroups import CgroupLimits, read, read_limits
from worker.expectations import counted

_HOST = Path("/")
_VM_STAT = Path("/usr/bin/vm_stat")
"""macOS's command that counts memory pages."""


@dataclass(frozen=True, slots=True)
class Cores:
    """What the number of threads follows from, read once, so that a confined engine, which cannot
    read the files, can derive it again."""

    of_cpus: Mapping[int, int]
    """The core of each CPU: threads of one core share its arithmetic units. A CPU that was offline
    is missing, and counts as a core of its own."""
    quota: float | None = None
    """CPU time per wall time that a control group allows, such as 2.5."""
    quota_origin: str = ""

    def threads(self, cpus: Collection[int]) -> tuple[int, str]:
        """How many threads compute where these CPUs are allowed, and why."""
        threads = n_cores = max(len({self.of_cpus.get(cpu, cpu) for cpu in cpus}), 1)
        parts = [f"{counted(len(cpus), 'CPU')} allowed", counted(n_cores, "physical core")]
        if self.quota is not None:
            parts.append(f"quota of {self.quota:g} CPUs ({self.quota_origin})")
            threads = max(min(n_cores, math.floor(self.quota)), 1)
        return threads, f"{threads}: the least of " + ", ".join(parts)


@dataclass(frozen=True, slots=True)
class CpuBudget:
    threads: int
    derivation: str
    """How `threads` was derived, in one sentence for the log and for `doctor`."""
    memory_limit_bytes: int | None
    """The tightest limit, of a control group or of the address space; `None` without one."""
    memory_available_bytes: int
    """Memory that this process may still use: what the host has free, or what the limit leaves."""
    memory_derivation: str = ""
    memory_total_bytes: int = 0
    """The host's memory, or the limit if that is less."""
    cores: Cores | None = None
    """`None` if the user has set the number of threads."""


def cpu_budget(override: int | None, root: Path = _HOST) -> CpuBudget:
    """The budget of this process; `override` is the user's own number of threads."""
    limits = read_limits(root)
    cpus, online = _allowed_cpus(root)
    cores = Cores(_cores([*{*cpus, *online}], root), limits.cpus, limits.cpus_origin)
    threads, derivation = cores.threads(cpus)
    if override is not None:
        threads, derivation = override, f"set by --threads (without it: {threads})"
    available, memory_derivation = _memory(limits, root)
    limit = min(filter(None, (limits.memory_bytes, _address_space())), default=None)
    total = min(_host_total_bytes(root), limit or sys.maxsize)
    return CpuBudget(
        *(threads, derivation, limit, available, memory_derivation, total),
        cores=cores if override is None else None,
    )


def _allowed_cpus(root: Path) -> tuple[list[int], list[int]]:
    """The CPUs that cpusets and the affinity mask allow to this process, and all online ones."""
    for line in read(root / "proc/self/status").splitlines():  # only Linux has it
        if line.startswith("Cpus_allowed_list:"):
            allowed = parse_cpu_list(line.partition(":")[2])
            # The mask may name CPUs that are offline or do not exist.
            online = parse_cpu_list(read(root / "sys/devices/system/cpu/online"))
            return [cpu for cpu in allowed if not online or cpu in online] or allowed, online
    every = list(range(os.cpu_count() or 1))
    return every, every


def _cores(cpus: list[int], root: Path) -> dict[int, int]:
    """The core of each of these CPUs."""
    if sys.platform == "darwin" and root == _HOST:
        n_cores = _darwin_performance_cores() or len(cpus)
        return {cpu: min(cpu, n_cores - 1) for cpu in cpus}
    cores = {}
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = read(topology / "core_cpus_list") or read(topology / "thread_siblings_list")
        cores[cpu] = min(parse_cpu_list(siblings), default=cpu)
    return cores


def _darwin_performance_cores() -> int | None:
    """The number of performance cores: at every barrier, they would wait for efficiency cores."""
    for name in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"):
        found = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True)
        if found.returncode == 0 and found.stdout.strip().isdigit():
            return int(found.stdout)
    return None


def parse_cpu_list(text: str) -> list[int]:
    """Parse a list such as `0-3,8`, as the kernel writes it; empty text is an empty list."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cpus += range(int(first), int(last or first) + 1)
    return cpus


def _memory(limits: CgroupLimits, root: Path) -> tuple[int, str]:
    left = [(_host_memory_bytes(root), "free on this host")]
    if limits.memory_free_bytes is not None:
        left.append((limits.memory_free_bytes, f"left below the limit of {limits.memory_origin}"))
    if (space := _address_space()) is not None:
        n_pages, _, _ = read(root / "proc/self/statm").partition(" ")
        used = int(n_pages or 0) * resource.getpagesize()
        left.append((max(space - used, 0), "left of the address space that ulimit -v allows"))
    return min(left)


def _address_space() -> int | None:
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if space == resource.RLIM_INFINITY else space


def darwin_free_bytes(vm_stat: bytes) -> int:
    """The bytes that `vm_stat` counts as free, or as kept only for reuse."""
    page_size = re.search(rb"page size of (\d+) bytes", vm_stat)
    pages = re.findall(rb"^Pages (?:free|inactive|speculative): +(\d+)\.", vm_stat, re.MULTILINE)
    return sum(map(int, pages)) * int(page_size[1]) if page_size else 0


def _host_total_bytes(root: Path) -> int:
    return _meminfo("MemTotal", root) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _host_memory_bytes(root: Path) -> int:
    """Memory that can be used without swapping."""
    if (available := _meminfo("MemAvailable", root)) is not None:
        return available
    if not _VM_STAT.exists():
        return _host_total_bytes(root)
    return darwin_free_bytes(subprocess.run([_VM_STAT], capture_output=True).stdout)


def _meminfo(name: str, root: Path) -> int | None:
    """The bytes in one line of Linux's `/proc/meminfo`; `None` without that file."""
    lines = read(root / "proc/meminfo").splitlines()
    if not lines:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
