"""Compiles the upstream wheel: fresh sources, pinned tools, the recipe's flags, a child process.

A compile is kept in the cache by itself, so that another way of repacking it costs seconds. Its
folder holds the wheel, llama.cpp's licence, SHA256SUMS and `made-of.json`, which is the wheel's
stamp: everything that decides what the compiler made.
"""

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from builds import cuda, processor, sdist, store, toolchain, variants, vulkan
from builds.errors import BuildError
from builds.pins import FOLDER, Pins, Recipe

# Not needed to compile, and most of the bytes. With `.git`, the machine's git would decide whether
# a commit is compiled in.
NOT_COMPILED = (
    ".git/",
    "docs/",
    "examples/",
    "vendor/llama.cpp/docs/",
    "vendor/llama.cpp/models/",
    "vendor/llama.cpp/tests/",
)
# A repair of GCC's output for ggml's AMX code, included before every C++ file of ggml.
TILE_CONFIG = (FOLDER / "tile_config.cmake", FOLDER / "tile_config.h")
LLAMA_CPP = FOLDER / "llama_cpp.cmake"
# Any fixed moment: otherwise, llama.cpp and the wheel's archive would have the time of the build.
SOURCE_DATE_EPOCH = "1577836800"
# Variables of the caller's shell that would change the wheel without the recipe's knowledge.
NOT_INHERITED = re.compile(
    r"^(CMAKE_|SKBUILD|FORCE_CMAKE|GGML_|LLAMA_|(C|CXX|CPP|CUDA|LD)FLAGS$|PIP_)"
)
KEPT = ("PIP_CERT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_PROXY")
LICENSE = "llama.cpp-LICENSE"
MADE_OF = "made-of.json"


def made_of(recipe: Recipe, pins: Pins) -> dict[str, Any]:
    """All that decides what the compiler makes."""
    code = [Path(__file__)]
    machine: dict[str, str] = {}
    if recipe.cmake.get("GGML_NATIVE") == "ON":
        machine["processor"] = processor.features()
    if left_out := _variants_left_out(recipe):
        machine["without_variants_of"] = " ".join(left_out)
    if "GGML_CUDA" in recipe.cmake:
        machine["nvcc"] = cuda.compiler()
        code.append(Path(cuda.__file__))
    if "GGML_VULKAN" in recipe.cmake:
        machine["vulkan"] = vulkan.compiler()
        code.append(Path(vulkan.__file__))
    return {
        **machine,
        "backend": recipe.backend,
        "llama_cpp_python": pins.version,
        "llama_cpp_commit": pins.llama_cpp_commit,
        "sdist_sha256": pins.sdist_sha256,
        "flags": dict(recipe.cmake),
        "environment": dict(recipe.environment),
        "compiler": toolchain.compiler(),
        "toolchain": {name: pins.toolchain[name] for name in toolchain.COMPILES},
        "platform": platform_name(),
        "code": [store.code_hash(*code), *tile_config_hashes(), store.sha256(LLAMA_CPP)],
    }


def _variants_left_out(recipe: Recipe) -> list[str]:
    return variants.refused() if recipe.cmake.get("GGML_CPU_ALL_VARIANTS") == "ON" else []


def tile_config_flag() -> str:
    return f"-DCMAKE_PROJECT_ggml_INCLUDE={TILE_CONFIG[0]}"


def tile_config_hashes() -> list[str]:
    return [store.sha256(path) for path in TILE_CONFIG]


def compiled(
    recipe: Recipe, pins: Pins, given_sdist: Path | None = None, jobs: int | None = None
) -> Path:
    """The folder of this compile; several minutes the first time.

    `jobs` is the most compilers that run at once, nvcc's among them; without it as many as the
    processors.
    """
    inputs = made_of(recipe, pins)
    name = f"{recipe.backend}-{pins.version}-{store.key(inputs)}"
    home = store.folder("compiled") / name
    with store.lock(f"compile-{name}"):
        if not store.is_whole(home):
            archive = sdist.fetch(pins, given_sdist)
            commit = sdist.commit(archive)
            if commit != pins.llama_cpp_commit:
                raise BuildError(
                    f"The sources hold llama.cpp {commit}, versions.toml says "
                    f"{pins.llama_cpp_commit}: correct llama_cpp_commit there."
                )
            with (
                store.replacing(home) as partial,
                tempfile.TemporaryDirectory(prefix="llorch-build-") as scratch,
            ):
                work = Path(scratch).resolve()
                wheel = _compile(archive, recipe, pins, work, jobs)
                shutil.copy2(wheel, partial / wheel.name)
                shutil.copy2(work / "source/vendor/llama.cpp/LICENSE", partial / LICENSE)
                text = json.dumps(inputs | {"llama_cpp_commit": commit}, indent=2, sort_keys=True)
                (partial / MADE_OF).write_text(text + "\n")
                store.seal(partial)
    return home


def _compile(archive: Path, recipe: Recipe, pins: Pins, work: Path, jobs: int | None) -> Path:
    """The wheel as upstream makes it, in a folder under `work`."""
    source, out = work / "source", work / "out"
    sdist.extract(archive, source, without=NOT_COMPILED)
    if left_out := _variants_left_out(recipe):
        variants.leave_out(source, left_out)
    python = toolchain.python(pins)
    log = work / "build.log"
    command = [str(python), "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation"]
    command += ["--no-cache-dir", "--disable-pip-version-check", f"--wheel-dir={out}", str(source)]
    environment = _environment(recipe, pins, python, work)
    if jobs is not None:
        environment["CMAKE_BUILD_PARALLEL_LEVEL"] = str(jobs)
    store.say(f"compiling the {recipe.backend} wheel of llama-cpp-python {pins.version}")
    started = time.monotonic()
    if _run(command, environment, log) != 0:
        kept = store.folder("logs") / f"{recipe.backend}-failed.log"
        kept.write_bytes(log.read_bytes())
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise BuildError(f"{tail}\n\nCompiling llama-cpp-python failed; the whole log is {kept}.")
    store.say(f"compiled in {time.monotonic() - started:.0f} s")
    (wheel,) = out.glob("*.whl")
    return wheel


def _environment(recipe: Recipe, pins: Pins, python: Path, work: Path) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or not NOT_INHERITED.match(name)
    }
    # Assertions name their source file; without this, the wheel would have paths of this machine.
    same_paths = f"-ffile-prefix-map={work}=."
    more_of_llama = f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={LLAMA_CPP}"
    arguments = [*recipe.cmake_args, tile_config_flag(), more_of_llama]
    nvcc_flags = [f"-Xcompiler={same_paths}"]
    if "GGML_CUDA" in recipe.cmake:
        more_arguments, more_flags = cuda.completion(pins, work)
        arguments += more_arguments
        nvcc_flags += more_flags
    if "GGML_VULKAN" in recipe.cmake:
        arguments += vulkan.completion()
    return kept | {
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "CMAKE_ARGS": " ".join(arguments),
        "CMAKE_GENERATOR": "Ninja",
        "SKBUILD_BUILD_DIR": str(work / "build"),
        "CFLAGS": same_paths,
        "CXXFLAGS": same_paths,
        "CUDAFLAGS": " ".join(nvcc_flags),
        "LDFLAGS": " ".join([*_linker_flags(), recipe.environment.get("LDFLAGS", "")]).strip(),
        "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH,
        # If the cache is inside another checkout, the build must not use that checkout's commit.
        "GIT_CEILING_DIRECTORIES": str(work),
    }


def _linker_flags() -> list[str]:
    # The linker's build id is a hash that includes run paths into the temporary folder.
    return [] if sys.platform == "darwin" else ["-Wl,--build-id=none"]


def _run(command: list[str], environment: dict[str, str], log: Path) -> int:
    """Runs the build with its output in `log`; says every 10 seconds how far Ninja is."""
    step = re.compile(rb"\[(\d+)/(\d+)\]")
    said = started = time.monotonic()
    with log.open("wb") as handle:
        child = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        assert child.stdout is not None
        with child:
            try:
                for line in child.stdout:
                    handle.write(line)
                    at = step.search(line)
                    if at and time.monotonic() - said > 10:
                        said = time.monotonic()
                        store.say(f"  {int(at[1])} of {int(at[2])} steps, {said - started:.0f} s")
            except BaseException:
                os.killpg(child.pid, signal.SIGTERM)  # the compilers too
                raise
    return child.returncode


def platform_name() -> str:
    """What the compiled code depends on besides the compiler: system, processor, C library."""
    return "-".join([platform.system(), platform.machine(), *platform.libc_ver()]).strip("-")
