"""Builds llama.cpp's own programs from the pinned sdist, once, into the user's cache.

A peer is measured at its best: llama.cpp's default build, which is native to this machine's CPU,
with the same fix of GCC's AMX code as the worker's wheel. On a GPU it uses the plug-ins of the
installed wheel, because these take long to compile. Runs in the benchmark's process and starts
CMake as a child.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from builds import compile, processor, sdist, store, toolchain
from builds.pins import Pins
from tools.bench.errors import BenchError

PROGRAMS = ("llama-server", "llama-batched-bench", "llama-bench", "llama-quantize")
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
NATIVE_FLAGS = ("-DGGML_NATIVE=ON",)
PLUGIN_FLAGS = ("-DGGML_NATIVE=OFF", "-DGGML_BACKEND_DL=ON", "-DGGML_CPU=OFF")
STAMP = "llorch-build.json"
"""File beside a wheel's libraries that records what it was made of."""
BUILD_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Peers:
    """The folders of the pinned sources and of the programs built from them, and how they were
    built."""

    sources: Path
    """The unpacked sdist; read-only."""
    folder: Path
    version: str
    commit: str
    compiler: str
    flags: tuple[str, ...]

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)


def build_peers(
    pins: Pins,
    jobs: int,
    archive: Path | None = None,
    *,
    backend: str = "cpu",
    libraries: Path | None = None,
) -> Peers:
    """Return the built programs; the first call takes minutes, later ones no time.

    For a GPU's `backend`, the plug-ins are those in `libraries`, by default the installed wheel's.
    """
    peers = peers_of(pins, archive, backend=backend, libraries=libraries)
    with store.lock("bench-peers"):
        if not peers.folder.is_dir():
            source = peers.sources / "vendor" / "llama.cpp"
            plugins = [] if backend == "cpu" else _plugins(libraries or installed_libraries())
            _build(pins, source, peers, jobs, plugins)
    return peers


def peers_of(
    pins: Pins, archive: Path | None = None, *, backend: str = "cpu", libraries: Path | None = None
) -> Peers:
    """Return the programs, which may not have been built yet."""
    sources = sdist.unpacked(pins, archive)
    compiler = toolchain.compiler()
    if backend == "cpu":
        # A native build runs only on its own CPU, so the CPU is part of the key.
        made_by = [compiler, processor.features()]
    else:
        made_by = [store.sha256((libraries or installed_libraries()) / STAMP)]
    inputs = [pins.sdist_sha256, *_flags(backend), *compile.tile_config_hashes(), *made_by]
    key = hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:12]
    folder = store.folder("bench", "peers") / f"{pins.version}-{key}"
    commit = pins.llama_cpp_commit
    return Peers(sources, folder, pins.version, commit, compiler, _flags(backend))


def _flags(backend: str) -> tuple[str, ...]:
    return CMAKE_FLAGS + (NATIVE_FLAGS if backend == "cpu" else PLUGIN_FLAGS)


def installed_libraries() -> Path:
    """The folder of this environment's libraries."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise BenchError("This Python has no llama_cpp; `make setup` installs it.")
    return Path(found.origin).with_name("lib")


def _plugins(libraries: Path) -> list[Path]:
    stamp = json.loads((libraries / STAMP).read_text("utf-8"))
    return [libraries / name for name in stamp["plugins"]]


def _build(pins: Pins, source: Path, peers: Peers, jobs: int, plugins: list[Path]) -> None:
    # Kept after a failure, so that the next run continues from here.
    folder = peers.folder
    tree = folder.with_name(f".{folder.name}.tree")
    tree.mkdir(parents=True, exist_ok=True)
    log = tree / "build.log"
    store.say(f"building {', '.join(PROGRAMS)} {pins.version} (some minutes; log: {log})")
    tools = toolchain.python(pins).parent
    cmake = str(tools / "cmake")
    with log.open("ab") as out:
        generator = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}")
        flags = [*peers.flags, compile.tile_config_flag()]
        _run([cmake, "-S", str(source), "-B", str(tree), *generator, *flags], out, log)
        _run([cmake, "--build", str(tree), "-j", str(jobs), "--target", *PROGRAMS], out, log)
    # Only bin/: the build tree is ten times as large.
    with store.replacing(folder) as partial:
        shutil.copytree(tree / "bin", partial / "bin", symlinks=True)
        for plugin in plugins:
            shutil.copy2(plugin, partial / "bin")
        shutil.copy2(log, partial / "build.log")
    shutil.rmtree(tree)


def _run(command: list[str], out: IO[bytes], log: Path) -> None:
    nice = ["nice", "-n", "10"] if shutil.which("nice") else []
    try:
        subprocess.run(
            [*nice, *command],
            stdout=out,
            stderr=subprocess.STDOUT,
            check=True,
            timeout=BUILD_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        raise BenchError(f"The build of llama.cpp's programs failed; see {log}.") from error
    except subprocess.TimeoutExpired as error:
        limit = f"{BUILD_TIMEOUT_S:.0f} s"
        raise BenchError(f"The build of llama.cpp's programs took over {limit}: {log}.") from error
