"""Packs what a bare machine without a package index needs: the checkout, sources, wheels.

The sources are the verified sdist without what is neither compiled nor read; the packed checkout
pins that archive instead. There, in the packed checkout:

    PIP_NO_INDEX=1 PIP_FIND_LINKS=$PWD/../wheels python3 -m builds setup --to-run --venv .venv \\
        --backend cuda --sdist ../llama_cpp_python-….tar.gz
    .venv/bin/pip install --no-index --find-links ../wheels --requirement ../test-tools.txt
    .venv/bin/python -m tools.gpu --backend cuda
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from builds import compile, locks, pins, sdist, store, toolchain
from tests.support.worker import ROOT

KEPT = (
    "vendor/llama.cpp/models/ggml-vocab-gpt-2.gguf",
    "vendor/llama.cpp/models/ggml-vocab-qwen2.gguf",
)
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
MOST_BYTES = 64 << 20
# Of the test tools only this one is needed.
TEST_TOOLS = ("psutil",)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu pack", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    options = parser.parse_args(argv)
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True)
    archive = trimmed(sdist.fetch(pins.pins()), folder / pins.pins().sdist_name)
    checkout(folder / "checkout", store.sha256(archive))
    wheels(folder / "wheels", options.python)
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {total / 1e6:.0f} MB")
    if total > MOST_BYTES:
        print(f"That is more than {MOST_BYTES / 1e6:.0f} MB.", file=sys.stderr)
    return int(total > MOST_BYTES)


def trimmed(archive: Path, target: Path) -> Path:
    """The archive without what no step reads; the file that names its commit stays."""
    with tarfile.open(archive) as whole, tarfile.open(target, "w:gz", compresslevel=9) as small:
        for member in whole:
            path = member.name.partition("/")[2]
            needed = path in (*KEPT, sdist.COMMIT_FILE) or not path.startswith(compile.NOT_COMPILED)
            if needed:
                data = whole.extractfile(member) if member.isfile() else None
                small.addfile(member, data)
    return target


def checkout(target: Path, sdist_sha256: str) -> None:
    """What git tracks, with the trimmed archive as its pin."""
    target.mkdir()
    tracked = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(target)], input=tracked.stdout, check=True)
    versions = target / "builds" / "versions.toml"
    text, count = re.subn(
        r'(?m)^sha256 = "\w+"', f'sha256 = "{sdist_sha256}"', versions.read_text()
    )
    assert count == 1
    versions.write_text(text)


def wheels(target: Path, python: str) -> None:
    """The locked packages as wheels for that machine's Python."""
    tools = toolchain.python(pins.pins())
    wanted = target.with_name("test-tools.txt")
    locked = locks.TEST.read_text()
    entries = [re.search(rf"(?m)^{name}==(?:.*\\\n)*.*$", locked) for name in TEST_TOOLS]
    wanted.write_text("".join(f"{entry[0]}\n" for entry in entries if entry))
    platforms = [f"--platform={each}_x86_64" for each in PLATFORMS]
    for lock in (locks.RUNTIME, toolchain.LOCK, locks.CUDA, wanted):
        where = [f"--dest={target}", f"--requirement={lock}", f"--python-version={python}"]
        how = ["--require-hashes", "--no-deps", "--only-binary=:all:", "--implementation=cp"]
        toolchain.pip(tools, "download", *how, *platforms, *where)
