"""Imports modules of a package without everything else that its `__init__` imports.

Some packages import all of their modules when one is needed, which costs time at the start and
memory in both processes. Runs at import time, on the main thread.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType


def without_init(package: str) -> AbstractContextManager[None]:
    """Inside this block, modules of `package` are imported without running its `__init__`.

    A later `import package` runs it as usual.
    """
    spec = importlib.util.find_spec(package) if package not in sys.modules else None
    if spec is None:  # already imported, or missing, as the import will report
        return nullcontext()
    bare = ModuleType(package)
    bare.__spec__ = spec
    bare.__path__ = list(spec.submodule_search_locations or ())
    return _standing_in(package, bare)


def unavailable(package: str) -> AbstractContextManager[None]:
    """Inside this block, importing `package` fails; for libraries to which it is optional."""
    return nullcontext() if package in sys.modules else _standing_in(package, None)


@contextmanager
def _standing_in(package: str, module: ModuleType | None) -> Iterator[None]:
    sys.modules[package] = module  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
