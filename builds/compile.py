"""Compiles the upstream wheel: fresh sources, pinned tools, the recipe's flags, a child process."""

import os
import platform
import re
import subprocess
import time
from pathlib import Path

from builds import cuda, sdist, store, toolchain
from builds.errors import BuildError
from builds.pins import Pins, Recipe

# Not needed to compile, and most of the bytes. With `.git` there, it would depend on the machine's
# git whether a commit is compiled in.
NOT_COMPILED = (
    ".git/",
    "docs/",
    "examples/",
    "vendor/llama.cpp/docs/",
    "vendor/llama.cpp/models/",
    "vendor/llama.cpp/tests/",
)
# Any fixed moment; llama.cpp and the wheel's archive would otherwise carry the hour of the build.
SOURCE_DATE_EPOCH = "1577836800"
# Settings of the caller's shell that would change the wheel behind the recipe's back.
NOT_INHERITED = re.compile(
    r"^(CMAKE_|SKBUILD|FORCE_CMAKE|GGML_|LLAMA_|(C|CXX|CPP|CUDA|LD)FLAGS$|PIP_)"
)
KEPT = ("PIP_CERT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_PROXY")


def compile_wheel(archive: Path, recipe: Recipe, pins: Pins, work: Path) -> Path:
    """Returns the wheel as upstream makes it, in a folder under `work`."""
    source, out = work / "source", work / "out"
    sdist.extract(archive, source, without=NOT_COMPILED)
    python = toolchain.python(pins)
    log = work / "build.log"
    command = [str(python), "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation"]
    command += ["--no-cache-dir", "--disable-pip-version-check", f"--wheel-dir={out}", str(source)]
    environment = _environment(recipe, pins, python, work)
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
    # Assertions name their source file: without this the wheel would hold this machine's paths.
    same_paths = f"-ffile-prefix-map={work}=."
    arguments, nvcc_flags = list(recipe.cmake_args), [f"-Xcompiler={same_paths}"]
    if "GGML_CUDA" in recipe.cmake:
        more_arguments, more_flags = cuda.completion(pins, work)
        arguments += more_arguments
        nvcc_flags += more_flags
    return kept | {
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "CMAKE_ARGS": " ".join(arguments),
        "CMAKE_GENERATOR": "Ninja",
        "SKBUILD_BUILD_DIR": str(work / "build"),
        "CFLAGS": same_paths,
        "CXXFLAGS": same_paths,
        "CUDAFLAGS": " ".join(nvcc_flags),
        "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH,
        # A cache inside somebody's checkout must not lend that checkout's commit to the build.
        "GIT_CEILING_DIRECTORIES": str(work),
        **recipe.environment,
    }


def _run(command: list[str], environment: dict[str, str], log: Path) -> int:
    """Runs the build with its output in `log`; tells every quarter of a minute how far Ninja is."""
    step = re.compile(rb"\[(\d+)/(\d+)\]")
    told = time.monotonic()
    with log.open("wb") as handle:
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert child.stdout is not None
        with child:
            for line in child.stdout:
                handle.write(line)
                at = step.search(line)
                if at and time.monotonic() - told > 15:
                    told = time.monotonic()
                    store.say(f"  {int(at[1])} of {int(at[2])} steps")
    return child.returncode


def platform_name() -> str:
    """What the compiled code depends on besides the compiler: system, processor, C library."""
    return "-".join([platform.system(), platform.machine(), *platform.libc_ver()]).strip("-")
