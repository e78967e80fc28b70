"""llama.cpp's quantiser: writes a GGUF with smaller tensor types from another GGUF.

Runs in a short-lived process of its own: native code may end its process, and the call neither
returns early nor reacts to signals.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from worker.errors import ModelError
from worker.llama import library

MAX_BUFFER_BYTES = 128 << 20
"""The most bytes of tensor rows that the quantiser keeps in memory at once."""

_PROGRESS = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")


def quantize(
    source: Path,
    target: Path,
    file_type: int,
    *,
    threads: int,
    importance: Mapping[str, npt.NDArray[np.float32]] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write `target` with the mixture of types that `file_type` (a `llama_ftype`) stands for.

    `importance` has a weight for each input of the tensors that it names. `on_progress` gets the
    number of finished tensors and of all tensors.

    Raises:
        ModelError: the quantiser refuses; the message has the last error line of its log.
    """
    flat = library.load()
    params = flat.llama_model_quantize_default_params()
    params.ftype = file_type
    params.nthread = threads
    params.max_buf_size = MAX_BUFFER_BYTES
    if importance:
        entries = (flat.llama_model_imatrix_data * (len(importance) + 1))()
        for entry, (name, weights) in zip(entries, importance.items(), strict=False):
            entry.name = name.encode()
            entry.data = weights.ctypes.data_as(type(entry.data))
            entry.size = weights.size
        params.imatrix = entries

    def listen(_level: str, line: str) -> None:
        if on_progress is not None and (match := _PROGRESS.search(line)):
            on_progress(int(match[1]), int(match[2]))

    previous, library.log.listener = library.log.listener, listen
    try:
        with library.log.capture() as lines:
            result = flat.llama_model_quantize(
                str(source).encode(), str(target).encode(), ctypes.byref(params)
            )
    finally:
        library.log.listener = previous
    if result != 0:
        reason = next((line for line in reversed(lines) if "error" in line or "fail" in line), "")
        raise ModelError(f"llama.cpp cannot quantise {source.name}: {reason.strip()}")
