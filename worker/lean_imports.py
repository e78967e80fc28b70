"""Imports parts of packages without the rest that their `__init__` imports.

Some packages import all their modules as soon as one of them is needed, which costs time at the
start and memory in both processes. Runs at import time, on the main thread.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def without_init(package: str) -> Iterator[None]:
    """Inside this block, modules of `package` are imported without running its `__init__`.

    A later `import package` runs it as usual.
    """
    spec = importlib.util.find_spec(package) if package not in sys.modules else None
    if spec is None:  # already imported, or missing, which the import will report
        yield
        return
    bare = ModuleType(package)
    bare.__spec__ = spec
    bare.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[package] = bare
    try:
        yield
    finally:
        del sys.modules[package]


@contextmanager
def unavailable(package: str) -> Iterator[None]:
    """Inside this block, importing `package` fails, for libraries that use it only if it exists."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
