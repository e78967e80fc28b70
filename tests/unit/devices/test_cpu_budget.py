"""The CPU budget from fake /proc and /sys trees, for states that one machine cannot be in."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.devices.cpu.budget import cpu_budget, darwin_free_bytes, parse_cpu_list
from worker.devices.cpu.cgroups import read_limits
from worker.expectations import counted

GIB = 1 << 30


class Host:
    """A tree with `n_cpus` CPUs, two hardware threads per core if `smt`."""

    def __init__(self, root: Path, n_cpus: int = 16, *, smt: bool = False) -> None:
        self.root = root
        self.write(
            "proc/meminfo",
            f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {32 * GIB // 1024} kB\n",
        )
        self.write("sys/devices/system/cpu/online", f"0-{n_cpus - 1}\n")
        self.allow(f"0-{n_cpus - 1}")
        half = n_cpus // 2
        for cpu in range(n_cpus):
            siblings = f"{cpu % half},{cpu % half + half}" if smt else str(cpu)
            topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
            self.write(f"{topology}/thread_siblings_list", siblings + "\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def allow(self, cpus: str) -> None:
        self.write("proc/self/status", f"Name:\tpython\nCpus_allowed_list:\t{cpus}\n")

    def v2(self, group: str, mount_root: str = "/") -> None:
        self.write("proc/self/cgroup", f"0::{group}\n")
        self.write(
            "proc/self/mountinfo",
            f"30 23 0:26 {mount_root} /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n",
        )

    def v1(self, group: str, mount_root: str = "/") -> None:
        self.write("proc/self/cgroup", f"4:memory:{group}\n3:cpu,cpuacct:{group}\n0::/\n")
        self.write(
            "proc/self/mountinfo",
            "".join(
                f"{n} 30 0:{n} {mount_root} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n"
                for n, name in ((40, "cpu,cpuacct"), (41, "memory"))
            ),
        )


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def threads(host: Host) -> int:
    return cpu_budget(None, host.root).threads


@pytest.mark.parametrize(
    ("smt", "allowed", "n_cpus", "n_cores"),
    [
        (False, "0-15", 16, 16),
        (False, "2-4,9", 4, 4),
        (False, "0-127", 16, 16),  # most of them are offline
        (True, "0-15", 16, 8),
        (True, "3,11", 2, 1),  # two threads of one core
    ],
)
def test_each_allowed_core_counts_once(
    smt: bool, allowed: str, n_cpus: int, n_cores: int, tmp_path: Path
) -> None:
    host = Host(tmp_path, smt=smt)
    host.allow(allowed)
    budget = cpu_budget(None, host.root)
    assert budget.threads == n_cores
    allowed, cores = counted(n_cpus, "CPU"), counted(n_cores, "physical core")
    assert f"{allowed} allowed, {cores}" in budget.derivation


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("200000 100000", 2), ("765000 100000", 7), ("50000 100000", 1), ("max 100000", 16)],
)
def test_a_quota_is_rounded_down_but_never_to_nothing(
    host: Host, quota: str, expected: int
) -> None:
    host.v2("/")
    host.write("sys/fs/cgroup/cpu.max", quota + "\n")
    assert threads(host) == expected


def test_the_smallest_quota_along_the_path_counts(host: Host) -> None:
    host.v2("/pods/pod7/worker")
    host.write("sys/fs/cgroup/pods/cpu.max", "800000 100000\n")
    host.write("sys/fs/cgroup/pods/pod7/cpu.max", "300000 100000\n")
    host.write("sys/fs/cgroup/pods/pod7/worker/cpu.max", "max 100000\n")
    budget = cpu_budget(None, host.root)
    assert budget.threads == 3
    assert "pod7/cpu.max" in budget.derivation


@pytest.mark.parametrize(
    ("group", "folder"),
    [("/docker/4f2a", ""), ("/docker/4f2a/worker", "worker/"), ("/../other", "")],
)
def test_a_container_that_sees_a_group_as_the_root(host: Host, group: str, folder: str) -> None:
    """Its own, a parent, or one that does not contain its own."""
    host.v2(group, mount_root="/docker/4f2a")
    host.write(f"sys/fs/cgroup/{folder}cpu.max", "400000 100000\n")
    assert threads(host) == 4


def test_version_1_quotas_nest_too(host: Host) -> None:
    host.v1("/docker/4f2a")
    cpu = "sys/fs/cgroup/cpu,cpuacct"
    for folder, quota in (("docker", "600000"), ("docker/4f2a", "250000"), ("", "-1")):
        host.write(f"{cpu}/{folder}/cpu.cfs_quota_us", quota + "\n")
        host.write(f"{cpu}/{folder}/cpu.cfs_period_us", "100000\n")
    assert threads(host) == 2


def test_the_override_wins_and_is_reported(host: Host) -> None:
    budget = cpu_budget(5, host.root)
    assert budget.threads == 5
    assert "--threads" in budget.derivation and "16" in budget.derivation


def test_memory_limit_of_version_2(host: Host) -> None:
    host.v2("/a/b")
    host.write("sys/fs/cgroup/a/memory.max", f"{8 * GIB}\n")
    host.write("sys/fs/cgroup/a/memory.current", f"{3 * GIB}\n")
    host.write(
        "sys/fs/cgroup/a/memory.stat", f"anon 5\ninactive_file {1 * GIB}\nactive_file {GIB // 2}\n"
    )
    host.write("sys/fs/cgroup/a/b/memory.max", "max\n")
    budget = cpu_budget(None, host.root)
    assert budget.memory_limit_bytes == budget.memory_total_bytes == 8 * GIB
    assert budget.memory_available_bytes == 6.5 * GIB


def test_the_level_with_least_left_counts_even_if_its_limit_is_larger(host: Host) -> None:
    host.v2("/a/b")
    host.write("sys/fs/cgroup/a/memory.max", f"{8 * GIB}\n")
    host.write("sys/fs/cgroup/a/memory.current", f"{7 * GIB}\n")
    host.write("sys/fs/cgroup/a/b/memory.max", f"{4 * GIB}\n")
    host.write("sys/fs/cgroup/a/b/memory.current", f"{1 * GIB}\n")
    budget = cpu_budget(None, host.root)
    assert budget.memory_limit_bytes == 4 * GIB
    assert budget.memory_available_bytes == 1 * GIB
    assert budget.memory_derivation.endswith("/a/memory.max")


def test_the_limit_of_memory_high_counts_too(host: Host) -> None:
    host.v2("/a")
    host.write("sys/fs/cgroup/a/memory.max", f"{8 * GIB}\n")
    host.write("sys/fs/cgroup/a/memory.high", f"{6 * GIB}\n")
    host.write("sys/fs/cgroup/a/memory.current", f"{1 * GIB}\n")
    budget = cpu_budget(None, host.root)
    assert budget.memory_limit_bytes == 6 * GIB
    assert budget.memory_available_bytes == 5 * GIB
    assert budget.memory_derivation.endswith("a/memory.high")


def test_a_limit_of_the_address_space_counts(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.write("proc/self/statm", f"{GIB // resource.getpagesize()} 2 3 4 5 6 7\n")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3 * GIB, 4 * GIB))
    budget = cpu_budget(None, host.root)
    assert budget.memory_limit_bytes == budget.memory_total_bytes == 3 * GIB
    assert budget.memory_available_bytes == 2 * GIB
    assert "ulimit -v" in budget.memory_derivation


def test_memory_limit_of_version_1(host: Host) -> None:
    host.v1("/docker/4f2a")
    memory = "sys/fs/cgroup/memory"
    host.write(f"{memory}/memory.limit_in_bytes", "9223372036854771712\n")
    host.write(f"{memory}/docker/4f2a/memory.limit_in_bytes", f"{2 * GIB}\n")
    host.write(f"{memory}/docker/4f2a/memory.usage_in_bytes", f"{1 * GIB}\n")
    limits = read_limits(host.root)
    assert limits.memory_bytes == 2 * GIB
    assert limits.memory_free_bytes == 1 * GIB


def test_without_a_limit_the_host_counts(host: Host) -> None:
    budget = cpu_budget(None, host.root)
    assert budget.memory_limit_bytes is None
    assert budget.memory_available_bytes == 32 * GIB
    assert budget.memory_total_bytes == 64 * GIB


def test_the_budget_of_this_machine_is_plausible(tmp_path: Path) -> None:
    budget = cpu_budget(None)
    assert 1 <= budget.threads <= (os.cpu_count() or 1)
    assert 0 < budget.memory_available_bytes < budget.memory_total_bytes
    assert budget.memory_total_bytes <= psutil.virtual_memory().total


@settings(deadline=None)  # a busy machine is not a slow parser
@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_are_read_as_the_kernel_writes_them(cpus: set[int]) -> None:
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][-1] == cpu - 1:
            ranges[-1].append(cpu)
        else:
            ranges.append([cpu])
    text = ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in ranges)
    assert parse_cpu_list(text + "\n") == sorted(cpus)


def test_memory_in_use_on_a_mac_is_not_free() -> None:
    """In the format of macOS 14, on a machine with 16 GiB."""
    vm_stat = b"""Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               24102.
Pages active:                            358846.
Pages inactive:                          341231.
Pages speculative:                        16713.
Pages throttled:                              0.
Pages wired down:                        152377.
Pages purgeable:                           7424.
File-backed pages:                       201458.
"""
    assert darwin_free_bytes(vm_stat) == (24102 + 341231 + 16713) * 16384
    assert darwin_free_bytes(b"") == 0
