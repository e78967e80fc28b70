"""The installation: the worker's version, and the folder for its files."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DISTRIBUTION = "llorch-worker"


@cache
def own_version() -> str:
    """The version in the package's metadata, kept because reading it takes a millisecond."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # a checkout that was not installed
        return "0+unknown"


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/llorch-worker`, or the usual place; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and os.path.isabs(base) else Path.home() / ".cache"
    return root / DISTRIBUTION
