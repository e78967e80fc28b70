"""The limits of this process's control groups on CPU time and memory, versions 1 and 2.

Reads files below a given root, in any process and thread. Groups nest, and each level may set a
limit. All levels from this process's group up to the mount's root are read; the least counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_V1_UNLIMITED_BYTES = 1 << 62
"""Version 1 writes "no limit" as the largest multiple of a page that fits its counter."""
_OCTAL = re.compile(r"\\(\d{3})")


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """The tightest limits; `None` if no level sets one."""

    cpus: float | None = None
    """CPU time per wall time, such as 2.5."""
    cpus_origin: str = ""
    """The file that sets it, shown to the user."""
    memory_bytes: int | None = None
    memory_origin: str = ""
    """The file of the limit below which the least memory is left."""
    memory_free_bytes: int | None = None
    """The memory that is left there, including page cache that can be dropped."""


def read_limits(root: Path = Path("/")) -> CgroupLimits:
    """The limits of this process's groups, from `root`/proc and the mounts named there."""
    memberships = list(_memberships(root))
    cpu: list[tuple[float, str]] = []
    memory: list[tuple[int, str, int]] = []
    for version, mounted, mount_root, point in _mounts(root):
        for own_version, controllers, group in memberships:
            if own_version != version or (version == 1 and not mounted & controllers):
                continue
            # A folder without the controller has no such file.
            for folder in _levels(root / point.relative_to("/"), mount_root, group):
                cpu += _cpu_limit(folder, version)
                memory += _memory_limit(folder, version)
    cpus, cpus_origin = min(cpu, default=(None, ""))
    limit = min((limit for _, _, limit in memory), default=None)
    free, origin, _ = min(memory, default=(None, "", 0))
    return CgroupLimits(cpus, cpus_origin, limit, origin, free)


def _memberships(root: Path) -> Iterator[tuple[int, frozenset[str], PurePosixPath]]:
    """The lines of /proc/self/cgroup: `id:controllers:group`; version 2 has no controllers."""
    for line in read(root / "proc/self/cgroup").splitlines():
        number, controllers, group = line.split(":", 2)
        version = 2 if number == "0" and not controllers else 1
        yield version, frozenset(controllers.split(",")), PurePosixPath(group)


def _mounts(root: Path) -> Iterator[tuple[int, frozenset[str], PurePosixPath, PurePosixPath]]:
    """The mounts of control groups in /proc/self/mountinfo: version, controllers, the group at the
    mount point, and that point."""
    for line in read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or not tail or tail[0] not in ("cgroup", "cgroup2"):
            continue
        # Spaces and the like are octal escapes.
        paths = (_OCTAL.sub(lambda match: chr(int(match[1], 8)), each) for each in fields[3:5])
        mount_root, point = map(PurePosixPath, paths)
        version = 2 if tail[0] == "cgroup2" else 1
        yield version, frozenset(tail[-1].split(",")), mount_root, point


def _levels(point: Path, mount_root: PurePosixPath, group: PurePosixPath) -> Iterator[Path]:
    """The folders from the mount point down to the process's own group.

    A container often sees its group's path on the host, while the mount has that very group as its
    root. Only the mount point can be read then.
    """
    yield point
    try:
        below = group.relative_to(mount_root)
    except ValueError:
        return
    for part in below.parts:
        point = point / part
        if part == ".." or not point.is_dir():
            return
        yield point


def _cpu_limit(folder: Path, version: int) -> list[tuple[float, str]]:
    if version == 2:
        file = folder / "cpu.max"
        quota, _, period = read(file).strip().partition(" ")
    else:
        file = folder / "cpu.cfs_quota_us"
        quota, period = read(file).strip(), read(folder / "cpu.cfs_period_us").strip()
    if not quota.isdigit() or not period.isdigit() or int(period) == 0 or int(quota) == 0:
        return []  # absent, `max`, or -1
    return [(int(quota) / int(period), str(file))]


def _memory_limit(folder: Path, version: int) -> list[tuple[int, str, int]]:
    """What is left below the limit, its file, and the limit."""
    limit_names, usage_name, prefix = {
        1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
        # Beyond `high`, the kernel throttles the processes.
        2: (("memory.max", "memory.high"), "memory.current", ""),
    }[version]
    found = [(read(folder / name).strip(), str(folder / name)) for name in limit_names]
    limits = [(int(limit), file) for limit, file in found if limit.isdigit()]
    limit, file = min(limits, default=(_V1_UNLIMITED_BYTES, ""))
    if limit >= _V1_UNLIMITED_BYTES:
        return []
    usage = read(folder / usage_name).strip()
    used_bytes = int(usage) if usage.isdigit() else 0
    # Pages of files, such as an earlier start's mapped model, are dropped for new allocations.
    droppable_bytes = 0
    for line in read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in (f"{prefix}inactive_file", f"{prefix}active_file") and value.isdigit():
            droppable_bytes += int(value)
    left = limit - max(used_bytes - droppable_bytes, 0)
    return [(max(left, 0), file, limit)]


def read(path: Path) -> str:
    """A small file's text; empty if it is absent or cannot be read."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
