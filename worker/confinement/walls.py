"""The walls around a process that loads a model: what it can no longer do, and whether they hold.

A process raises them around itself and cannot take them down. A worker serves even if the kernel
lacks one. Runs on the main thread, before native code reads a file that may be hostile, and before
there are other threads, which Landlock would not bind.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import worker
from worker.confinement import landlock, libc, seccomp
from worker.wire.backends import BACKENDS, BackendName
from worker.wire.engine_info import Wall, WallName
from worker.wire.engine_settings import EngineSettings

_SYSTEM = (
    *("/usr", "/lib", "/lib64", "/nix/store", "/gnu/store", "/run/opengl-driver", "/sys"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/vulkan", "/etc/glvnd", "/etc/drirc"),
    *(f"/proc/{name}" for name in ("self", "cpuinfo", "meminfo", "stat", "sys", "version")),
    *(f"/proc/{name}" for name in ("modules", "devices", "filesystems", "driver")),
)
"""What the C library, drivers and Python read from the system; none of it is secret."""
_NODES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_LIBRARY_VARIABLES = ("LD_LIBRARY_PATH", "GGML_", "VK_", "MESA_", "CUDA_", "NVIDIA_", "__GL_")
"""Prefixes of variables in which an operator names files for libraries."""
_OWN_THREADS = "/proc/self/task"
"""CUDA's driver writes the names of its threads there, and does not start if it cannot."""
_NVIDIA, _NVIDIA_NODE = Path("/proc/driver/nvidia/version"), Path("/dev/nvidia-uvm")
_MAKE_NVIDIA_NODES = ("nvidia-modprobe", "-c0", "-u")
"""CUDA runs this itself if a node is missing; inside the walls it would not be privileged."""


class Walls:
    """The constructor raises the walls that do not hinder a load, `close` the rest."""

    def __init__(
        self,
        settings: EngineSettings,
        reads: Iterable[Path],
        writes: Iterable[Path] = (),
        driver_cache: Path | None = None,
    ) -> None:
        """`reads` are files: the model's, and others that a setting names. `writes` are folders,
        created if missing. A GPU's driver keeps what it compiles in `driver_cache`."""
        self._settings = settings
        self._found: list[Wall] = []
        if settings.on_gpu and driver_cache is not None:
            writes = [*writes, driver_cache]
            for variable in BACKENDS[settings.backend].cache_variables:
                os.environ.setdefault(variable, str(driver_cache))
        rules = set(_rules(settings.backend, reads, writes))
        self._raise("core_dumps", forbid_core_dumps)
        self._raise("files", lambda: _restrict_files(rules))
        if not settings.on_gpu:
            self._raise("system_calls", _restrict_calls)

    def close(self) -> tuple[Wall, ...]:
        """Raise the rest, once the model is loaded and a GPU's driver is connected; return all."""
        if self._settings.on_gpu:
            self._raise("system_calls", _restrict_calls)
        return tuple(self._found)

    def _raise(self, name: WallName, build: Callable[[], str]) -> None:
        if not self._settings.confine:
            wall = Wall(name, False, "--no-confine")
        else:
            try:
                wall = Wall(name, True, build())
            except OSError as error:
                wall = Wall(name, False, error.strerror or str(error))
        self._found.append(wall)


def forbid_core_dumps() -> str:
    """Forbid core dumps, which would contain prompts; returns what forbids them."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":
        return "a limit of 0 bytes"
    libc.set_not_dumpable()  # the limit does not apply to piped core dumps
    return "not dumpable"


def _restrict_files(rules: Iterable[tuple[str, int]]) -> str:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "only Linux has Landlock")
    n_others = len(os.listdir("/proc/self/task")) - 1
    version = landlock.restrict(rules)
    if n_others:
        raise OSError(errno.EBUSY, f"threads that existed before are not bound: {n_others}")
    return f"Landlock {version}"


def _restrict_calls() -> str:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "only Linux has seccomp")
    seccomp.restrict()
    return "seccomp"


def _rules(
    backend: BackendName, reads: Iterable[Path], writes: Iterable[Path]
) -> Iterator[tuple[str, int]]:
    """Paths, with the rights on each and everything below it."""
    for path in (*_SYSTEM, *_python(), *map(str, reads)):
        yield path, landlock.READ
    for pattern in (*_NODES, *_nodes(backend)):
        for node in glob.glob(pattern):
            yield node, landlock.DEVICE
    if BACKENDS[backend].on_gpu:
        yield _OWN_THREADS, landlock.READ | landlock.WRITE_FILE | landlock.TRUNCATE
    for folder in writes:
        with contextlib.suppress(OSError):  # whoever needs it reports that
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield str(folder), landlock.WRITE
    for name, value in os.environ.items():
        if name.startswith(_LIBRARY_VARIABLES):
            rights = landlock.WRITE if "CACHE" in name else landlock.READ
            yield from ((path, rights) for path in value.split(os.pathsep) if os.path.isabs(path))


def _python() -> Iterator[str]:
    """The interpreter and all packages: some modules are imported only when needed."""
    yield from (sys.prefix, sys.base_prefix, *worker.__path__)
    for folder in sys.path:
        if folder.endswith(("site-packages", "dist-packages")) and os.path.isdir(folder):
            yield folder
            yield from _linked(folder)


def _linked(folder: str) -> Iterator[str]:
    """The targets of packages that an installer has linked: the package itself, or each of its
    files, as `uv --link-mode=symlink` does."""
    for entry in _entries(folder):
        if entry.is_symlink():
            yield os.path.realpath(entry)
        elif entry.is_dir() and entry.name != "__pycache__":
            yield from _linked_package(entry.path)


def _linked_package(package: str) -> Iterator[str]:
    files = [entry for entry in _entries(package) if entry.is_symlink() or entry.is_file()]
    links = [entry for entry in files if entry.is_symlink()]
    if not files:  # a namespace package
        yield from _linked(package)
    for link in links:
        real = os.path.realpath(link)
        home = os.path.dirname(real)
        yield home if os.path.basename(home) == os.path.basename(package) else real


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:  # nothing can be imported from there either
        return []


def _nodes(backend: BackendName) -> tuple[str, ...]:
    nodes = BACKENDS[backend].nodes
    if nodes and _NVIDIA.exists() and not _NVIDIA_NODE.exists():
        with contextlib.suppress(OSError):
            subprocess.run(_MAKE_NVIDIA_NODES, capture_output=True, check=False)
    return nodes
