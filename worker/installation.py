"""The installation: the worker's version, the engine's, and the folder for its files."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from worker.errors import BackendMismatch

DISTRIBUTION = "llorch-worker"
ENGINE, ENGINE_RELEASE = "llama-cpp-python", "0.3.36"
"""The release whose structures and log this worker knows."""


@cache
def own_version() -> str:
    """The version in the package's metadata, kept because reading it takes a millisecond."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # a checkout that was not installed
        return "0+unknown"


def check_engine(backend: str = "cpu") -> None:
    """Raises `BackendMismatch` with the command that helps, unless the engine's release is here."""
    try:
        found = f"{ENGINE} {version(ENGINE).partition('+')[0]}"
    except PackageNotFoundError:
        found = "no engine"
    if found != f"{ENGINE} {ENGINE_RELEASE}":
        raise BackendMismatch(
            f"{found} is installed in {sys.prefix}, and this worker needs {ENGINE} "
            f"{ENGINE_RELEASE}; build and install it: llorch-worker install-engine {backend}"
        )


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/llorch-worker`, or the usual place; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and os.path.isabs(base) else _home() / ".cache"
    return root / DISTRIBUTION


def _home() -> Path:
    """The user's; `/`, as container runtimes have it, for a user whom the system does not know."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")
