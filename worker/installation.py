"""The installation: the versions of the worker and its engine, and the folder for its files."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from worker.errors import BackendMismatch

DISTRIBUTION = "llorch-worker"
ENGINE, ENGINE_RELEASE = "llama-cpp-python", "0.3.36"
"""The only release whose C structures and log output this worker knows."""


@cache
def own_version() -> str:
    """The version in the package's metadata, kept because reading it takes a millisecond."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # a checkout that is not installed
        return "0+unknown"


def check_engine(backend: str = "cpu") -> None:
    """Raises `BackendMismatch`, which names the remedy, unless the right engine is installed."""
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
    """`llorch-worker` in `$XDG_CACHE_HOME` or `~/.cache`; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and os.path.isabs(base) else _home() / ".cache"
    return root / DISTRIBUTION


def _home() -> Path:
    """The user's home; `/`, as in container runtimes, for a user that the system does not know."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")
