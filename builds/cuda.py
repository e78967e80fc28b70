"""What a CUDA build needs beside nvcc and a toolkit may lack: cuBLAS, and a driver to link against.

NVIDIA's images have both; a toolkit put together from packages often has neither. cuBLAS then comes
from its pinned package. The driver belongs to the machine with the GPU, so an empty library of its
name holds its place here; the wheel does not contain it.
"""

import re
import shutil
import subprocess
from pathlib import Path

from builds import pins as pinned
from builds import store, toolchain
from builds.errors import BuildError
from builds.pins import Pins


def compiler() -> str:
    """nvcc's own version; a sentence when there is none."""
    if shutil.which("nvcc") is None:
        raise BuildError(
            "No nvcc found. Install the CUDA toolkit (12.4 or newer) and put its bin folder into "
            "PATH, or build in its image: make image-cuda."
        )
    shown = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release [\d.]+, V[\d.]+", shown)
    return f"nvcc {release[0]}" if release else "nvcc"


def architecture_here() -> str:
    """The machine code of this machine's GPU, such as `90-real`."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError("nvidia-smi names no GPU; without --native none is needed.") from error
    return shown.split()[0].replace(".", "") + "-real"


def completion(pins: Pins, scratch: Path) -> tuple[list[str], list[str]]:
    """CMake arguments and nvcc flags that make up for what the toolkit lacks."""
    root = _toolkit()
    arguments: list[str] = []
    flags: list[str] = []
    if not list(root.glob("**/cublas_v2.h")):
        home = _cublas(pins)
        (header,) = home.rglob("cublas_v2.h")
        (library,) = home.rglob("libcublas.so.*")
        arguments += [f"-DCUDA_cublas_LIBRARY={library}"]
        flags += [f"-I{header.parent}"]
    if not list(root.glob("**/stubs/libcuda.so")):
        arguments += [f"-DCUDA_cuda_driver_LIBRARY={_driver_stub(scratch)}"]
    return arguments, flags


def _toolkit() -> Path:
    """The folder that nvcc takes its headers from; nvcc itself may be a script elsewhere."""
    command = ["nvcc", "--dryrun", "--cuda", "-x", "cu", "/dev/null", "-o", "/dev/null"]
    shown = subprocess.run(command, capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", shown, re.MULTILINE)
    if top is None:
        raise BuildError(f"nvcc does not say where its toolkit is: {shown.strip()[-500:]}")
    return Path(top[1].strip()).resolve()


def _cublas(pins: Pins) -> Path:
    version = pinned.versions()["cuda"]["nvidia-cublas"]
    home = store.folder("cuda") / f"nvidia-cublas-{version}"
    with store.lock(f"nvidia-cublas-{version}"):
        if not home.exists():
            store.say(f"the CUDA toolkit has no cuBLAS; taking nvidia-cublas {version}")
            with store.replacing(home) as partial:
                lock = pinned.FOLDER / "locks" / "cuda.txt"
                target = ["--no-compile", f"--target={partial}", f"--requirement={lock}"]
                tools = toolchain.python(pins)
                toolchain.pip(tools, "install", "--require-hashes", "--no-deps", *target)
    return home


def _driver_stub(scratch: Path) -> Path:
    stub = scratch / "libcuda.so"
    command = [
        "c++",
        "-shared",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        str(stub),
        "-x",
        "c++",
        "/dev/null",
    ]
    subprocess.run(command, check=True)
    return stub
