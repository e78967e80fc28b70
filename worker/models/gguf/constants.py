"""The gguf package's constants (keys, types, block sizes) without importing the package.

NOTE: `import gguf` imports NumPy, for which the API process has no other use. The constants are a
single module without dependencies. It is loaded when a file is read.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any


@cache
def constants() -> Any:
    """The module `gguf.constants`."""
    if "gguf" in sys.modules:
        return sys.modules["gguf"].constants
    package = importlib.util.find_spec("gguf")
    assert package is not None and package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "constants.py"
    spec = importlib.util.spec_from_file_location("_gguf_constants", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
