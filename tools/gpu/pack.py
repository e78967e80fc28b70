"""Compiles on this machine, which has nvcc, and packs what a bare machine with a GPU needs for the
report.

FILE then contains wheels, and llama.cpp's programs in a cache. On that machine, in the checkout:

    mkdir .pack && tar -xf FILE -C .pack
    python3 -m venv --without-pip .pack/venv
    python3 -m pip --python .pack/venv/bin/python install --no-index --no-deps .pack/wheels/*.whl
    XDG_CACHE_HOME=$PWD/.pack/cache .pack/venv/bin/python -m tools.gpu --backend cuda
"""

from __future__ import annotations

import argparse
import lzma
import os
import re
import shutil
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from builds import locks, pins, store, toolchain, wheels
from tests import ROOT
from tools.bench.model import VOCAB_FILES
from tools.bench.peer_build import build_peers

GLIBC = range(17, 40)
"""Minor versions of glibc that a wheel may require; pip needs each by name."""
OLD_NAMES = ("manylinux2014", "manylinux1")
DICTIONARY = 1 << 28
"""Size of xz's dictionary in bytes: the plug-ins are in the wheel and beside llama.cpp's programs,
and are stored once."""
# The only test tools that are needed, with their dependencies.
TEST_TOOLS = ("psutil", "httpx", "httpcore", "h11", "anyio", "idna", "certifi")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu pack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="such as .pack.tar.xz")
    parser.add_argument("--python", default="3.12", help="version on the machine with the GPU")
    parser.add_argument("--arch", required=True, help="architecture of its GPU, such as 90-real")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    options = parser.parse_args(argv)
    recipe = pins.recipe("cuda", architectures=(options.arch,))
    built = wheels.build(recipe, pins.pins(), jobs=options.jobs)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch, "pack")
        downloaded(folder / "wheels", options.python)
        shutil.copy2(toolchain.packed(pins.pins(), ROOT, Path(scratch)), folder / "wheels")
        unpacked = Path(scratch, "unpacked")
        with zipfile.ZipFile(built) as archive:
            archive.extractall(unpacked)
        stored(unpacked, folder / "wheels" / built.name)
        programs(folder / "cache", unpacked / "llama_cpp" / "lib", options.jobs)
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": DICTIONARY}]
        with (
            lzma.open(options.file, "wb", filters=filters) as compressed,
            tarfile.open(fileobj=compressed, mode="w") as tar,
        ):
            tar.add(folder, ".")
    print(f"{options.file}: {options.file.stat().st_size / 1e6:.0f} MB")
    return 0


def stored(unpacked: Path, wheel: Path) -> None:
    """Rewrite the wheel without compression, so that xz sees its files."""
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(unpacked.rglob("*")):
            archive.write(path, path.relative_to(unpacked))


def programs(cache: Path, libraries: Path, jobs: int) -> None:
    """Copy llama.cpp's programs and the vocabularies of the random models in the cache's layout."""
    peers = build_peers(pins.pins(), jobs, backend="cuda", libraries=libraries)
    here = store.folder()
    target = cache / here.name
    shutil.copytree(peers.folder, target / peers.folder.relative_to(here), symlinks=True)
    for name in set(VOCAB_FILES.values()):
        file = peers.sources / "vendor" / "llama.cpp" / "models" / name
        copy = target / file.relative_to(here)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)


def downloaded(target: Path, python: str) -> None:
    """Download the locked packages as wheels for that machine's Python."""
    tools = toolchain.python(pins.pins())
    locked = locks.TEST.read_text()
    entries = [re.search(rf"(?m)^{name}==(?:.*\\\n)*.*$", locked) for name in TEST_TOOLS]
    names = [f"manylinux_2_{minor}" for minor in GLIBC] + list(OLD_NAMES)
    platforms = [f"--platform={each}_x86_64" for each in names]
    with TemporaryDirectory() as scratch:
        wanted = Path(scratch, "test-tools.txt")
        wanted.write_text("".join(f"{entry[0]}\n" for entry in entries if entry))
        for lock in (locks.RUNTIME, wanted):
            where = [f"--dest={target}", f"--requirement={lock}", f"--python-version={python}"]
            how = ["--require-hashes", "--no-deps", "--only-binary=:all:", "--implementation=cp"]
            toolchain.pip(tools, "download", *how, *platforms, *where)
