"""Builds llama.cpp's own programs from the pinned sdist, once, into the user's cache.

A peer is measured at its best: llama.cpp's default build, which is native to this machine's CPU,
with the same repair of GCC's AMX code as the worker's wheel.
Runs in the benchmark's process and starts CMake as a child.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from builds import compile, processor, sdist, store, toolchain
from builds import cuda as cuda_toolkit
from builds.pins import Pins
from tools.bench.errors import BenchError

PROGRAMS = ("llama-server", "llama-batched-bench", "llama-bench", "llama-quantize")
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
CUDA_FLAGS = ("-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native", "-DGGML_CUDA_NCCL=OFF")
BUILD_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Peers:
    """Where the pinned sources and the programs made of them lie, and how they came about."""

    sources: Path
    """The unpacked sdist; to read, never to write into."""
    folder: Path
    version: str
    commit: str
    compiler: str

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)


def build_peers(pins: Pins, jobs: int, archive: Path | None = None, *, cuda: bool = False) -> Peers:
    """Return the built programs; the first call takes minutes, later ones nothing."""
    peers = peers_of(pins, archive, cuda=cuda)
    flags = CMAKE_FLAGS + (CUDA_FLAGS if cuda else ())
    with store.lock("bench-peers"):
        if not peers.folder.is_dir():
            source = peers.sources / "vendor" / "llama.cpp"
            _build(pins, source, peers.folder, jobs, flags)
    return peers


def peers_of(pins: Pins, archive: Path | None = None, *, cuda: bool = False) -> Peers:
    """The programs, built or not."""
    sources = sdist.unpacked(pins, archive)
    compiler = toolchain.compiler()
    # A native build runs only on the CPU it was made for, so the CPU is part of the key.
    flags = CMAKE_FLAGS + (CUDA_FLAGS if cuda else ())
    inputs = [pins.sdist_sha256, *flags, *compile.tile_config_hashes(), compiler]
    parts = "\n".join((*inputs, processor.features()))
    key = hashlib.sha256(parts.encode()).hexdigest()[:12]
    folder = store.folder("bench", "peers") / f"{pins.version}-{key}"
    return Peers(sources, folder, pins.version, pins.llama_cpp_commit, compiler)


def _build(pins: Pins, source: Path, folder: Path, jobs: int, chosen: tuple[str, ...]) -> None:
    # Kept after a failure: the next run goes on where this one stopped.
    tree = folder.with_name(f".{folder.name}.tree")
    tree.mkdir(parents=True, exist_ok=True)
    log = tree / "build.log"
    store.say(f"building {', '.join(PROGRAMS)} {pins.version} (some minutes; log: {log})")
    tools = toolchain.python(pins).parent
    cmake = str(tools / "cmake")
    with log.open("ab") as out:
        generator = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}")
        flags = [*chosen, compile.tile_config_flag()]
        if chosen != CMAKE_FLAGS:
            more, nvcc_flags = cuda_toolkit.completion(pins, tree)
            flags += [*more, f"-DCMAKE_CUDA_FLAGS={' '.join(nvcc_flags)}"]
        _run([cmake, "-S", str(source), "-B", str(tree), *generator, *flags], out, log)
        _run([cmake, "--build", str(tree), "-j", str(jobs), "--target", *PROGRAMS], out, log)
    # bin/ alone: a build tree holds ten times as much.
    with store.replacing(folder) as partial:
        shutil.copytree(tree / "bin", partial / "bin", symlinks=True)
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
