"""The engine process, with a llama.cpp whose load meets a failed assertion.

Files that fail one are refused before they get there, as far as they are known.
"""

from __future__ import annotations

from typing import Any

from worker.engine import process, start
from worker.llama import library


def fail(*_arguments: Any, **_options: Any) -> None:
    abort = library.ggml().ggml_abort
    abort.restype = None
    abort(b"/somewhere/ggml.c", 7, b"GGML_ASSERT(%s) failed", b"n_dims > 0")


if __name__ == "__main__":
    vars(start)["Model"] = fail
    process.main()
