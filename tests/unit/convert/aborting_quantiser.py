"""The quantiser's process, with a llama.cpp whose assertion fails."""

from __future__ import annotations

from tests.support.aborting_engine import fail
from worker.llama import quantize

if __name__ == "__main__":
    vars(quantize)["_quantize"] = fail
    quantize.main()
