"""Parts of packages without what their `__init__` brings along.

Some packages import all that they have as soon as one of their modules is wanted, which costs a
start a tenth of a second and both processes several megabytes. Runs at import time, on the main
thread.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def without_init(package: str) -> Iterator[None]:
    """Inside, modules of `package` are imported and its `__init__` is not run.

    Later, `import package` runs it as ever.
    """
    spec = importlib.util.find_spec(package) if package not in sys.modules else None
    if spec is None:  # it is imported already, or missing, which the import inside will say
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
    """Inside, importing `package` fails, for others that would use it if it were there."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
