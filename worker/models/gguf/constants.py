"""The gguf package's constants (keys, types, block sizes) without the rest of the package.

NOTE: `import gguf` imports NumPy, which the API process does not use otherwise.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from worker.lean_imports import without_init


@cache
def constants() -> Any:
    """The module `gguf.constants`, loaded when the first file is read."""
    with without_init("gguf"):
        return importlib.import_module("gguf.constants")
