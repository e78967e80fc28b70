"""Installs llama-cpp-python's example server, its packages and its bindings into the cache.

The example does not start without the multimodal library, which the worker's wheel lacks. So it
gets a default installation from the sdist: the same Python files with native libraries.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from builds import store, toolchain
from tools.bench.peer_build import Peers

PACKAGES = (
    "fastapi",
    "httptools",
    "jinja2",
    "numpy",
    "openai",
    "pydantic",
    "safetensors",
    "uvicorn",
    "uvloop",
    "websockets",
)
LIBRARIES = ("libggml*", "libllama.*", "libmtmd.*")


def example_packages(peers: Peers) -> Path:
    """Return a folder for `PYTHONPATH` with everything that the example imports."""
    tag = f"py{sys.version_info.major}{sys.version_info.minor}"
    folder = store.folder("bench") / f"example-{tag}-{peers.folder.name}"
    with store.lock("bench-example"):
        if not folder.is_dir():
            store.say("installing the example server's packages")
            with store.replacing(folder) as partial:
                _fill(partial, peers)
    return folder


def _fill(folder: Path, peers: Peers) -> None:
    toolchain.pip(Path(sys.executable), "install", "--target", str(folder), *PACKAGES)
    bindings = folder / "llama_cpp"
    ignored = shutil.ignore_patterns("lib", "__pycache__")
    shutil.copytree(peers.sources / "llama_cpp", bindings, ignore=ignored)
    (bindings / "lib").mkdir()
    for pattern in LIBRARIES:
        for library in sorted((peers.folder / "bin").glob(pattern)):
            shutil.copy2(library, bindings / "lib" / library.name, follow_symlinks=False)
