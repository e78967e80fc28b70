"""`llorch-worker install-engine BACKEND`: builds llama.cpp's wheel and installs it here.

The wheel is the same as in the project's images and tests: built from the pinned sources, with the
flags of the backend's recipe. The package contains the recipes; in a checkout they are in `builds`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from worker.arguments import Parser, add_command
from worker.background import die_with_parent
from worker.installation import default_cache_dir, own_version
from worker.wire.backends import BACKENDS

_PACKAGE = Path(__file__).resolve().parents[1]
_RECIPES = (_PACKAGE / "assets" / "engine", _PACKAGE.parent)
"""Folders that may contain the package `builds`: of an installation, of a checkout."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code: 0 if the engine is installed, 1 if not."""
    options = _parser().parse_args(arguments)
    folder = default_cache_dir() / "engine" / options.backend
    build = ["builds", options.backend, f"--out={folder}", *["--native"] * options.native]
    if _module(*build, path=next(each for each in _RECIPES if (each / "builds").is_dir())) != 0:
        return 1
    (wheel,) = folder.glob("*.whl")
    if importlib.util.find_spec("pip") is None:
        print(f"{sys.prefix} has no pip; install the wheel otherwise: uv pip install {wheel}")
        return 1
    pip = ["pip", "--disable-pip-version-check", "--quiet"]
    if _module(*pip, "install", "--no-deps", "--force-reinstall", str(wheel)) != 0:
        return 1
    print(f"installed {wheel.name}; llorch-{options.backend} starts a worker with it")
    return 0


def _module(*command: str, path: Path | None = None) -> int:
    environment = {**os.environ, "PYTHONPATH": str(path)} if path else None
    # SIGTERM, so that the build also ends its compilers; alone, it would outlive a killed parent.
    dies = partial(die_with_parent, signal.SIGTERM)
    child = subprocess.Popen([sys.executable, "-m", *command], env=environment, preexec_fn=dies)
    for ends in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ends, lambda *_: child.terminate())
    return child.wait()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="llorch-worker",
        description="Prepares an installation. llorch-cpu, llorch-cuda and the others serve.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {own_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    install = add_command(
        commands, "install-engine", "build llama.cpp's wheel for a backend and install it here"
    )
    install.add_argument("backend", choices=list(BACKENDS), help="as in llorch-BACKEND")
    install.add_argument(
        "--native", action="store_true", help="build for this processor only, which takes less time"
    )
    return parser
