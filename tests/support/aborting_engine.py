"""The engine process, with a llama.cpp whose assertion fails: during the load, or with
`LLAMA_ABORTS_FROM` in the first batch with this many rows.

Files that are known to fail an assertion are refused earlier.
"""

from __future__ import annotations

import os
from typing import Any

from worker.engine import process, start
from worker.llama import library
from worker.llama.batch import Batch
from worker.llama.context import Context


def fail(*_arguments: Any, **_options: Any) -> None:
    abort = library.ggml().ggml_abort
    abort.restype = None
    abort(b"/somewhere/ggml.c", 7, b"GGML_ASSERT(%s) failed", b"n_dims > 0")


class AbortingContext(Context):
    def decode(self, batch: Batch) -> Any:
        if batch.native.n_tokens >= int(os.environ["LLAMA_ABORTS_FROM"]):
            fail()
        return super().decode(batch)


if __name__ == "__main__":
    if "LLAMA_ABORTS_FROM" in os.environ:
        vars(start)["Context"] = AbortingContext
    else:
        vars(start)["Model"] = fail
    process.main()
