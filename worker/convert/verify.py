"""Reads a written GGUF back and holds every tensor against its source.

Values that were copied must have the same bits; values that were rounded must lie within the
rounding error of their type. Runs on the converter's worker threads.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from worker.convert.checkpoint import Checkpoint
from worker.convert.chunks import Chunk
from worker.convert.quantize import Q8_BLOCK, TensorType, decode, encode, to_float32
from worker.errors import ModelError

Read = Callable[[int, int], npt.NDArray[np.uint8]]
"""(offset, size) → bytes of the written file."""


def check_chunk(checkpoint: Checkpoint, read: Read, chunk: Chunk) -> None:
    """Raises:
    ModelError: a value of the chunk differs from its source by more than its type's error.
    """
    tensor, kind = chunk.placed.tensor, chunk.placed.kind
    written = read(chunk.offset, chunk.size_bytes)
    if chunk.piece is None:
        assert tensor.values is not None
        source = tensor.values
    else:
        source = chunk.piece.read(checkpoint, chunk.first_row, chunk.n_rows)
    if _is_exact(source.dtype, kind):
        same = encode(source, kind, tensor.plus)
        if same.data != written.data:
            raise _differs(chunk, "its bytes are not those of the source")
        return
    values = to_float32(source).reshape(-1)
    if tensor.plus:
        values = values + np.float32(tensor.plus)
    error = decode(written, kind).reshape(-1)
    error -= values
    np.abs(error, out=error)
    # A NaN is never within a bound.
    if not bool((error <= _bound(values, kind)).all()):
        worst = int(np.nanargmax(error)) if not np.isnan(error).all() else 0
        raise _differs(chunk, f"the value {values[worst]} cannot be held by {kind}")


def _is_exact(source: np.dtype[np.generic], kind: TensorType) -> bool:
    return kind == "F32" or (source, kind) in (
        (np.dtype(np.uint16), "BF16"),
        (np.dtype(np.float16), "F16"),
    )


def _bound(values: npt.NDArray[np.float32], kind: TensorType) -> npt.NDArray[np.float32]:
    if kind == "Q8_0":
        # Half a step of the scale, and the scale's own rounding to float16.
        largest = np.abs(values.reshape(-1, Q8_BLOCK)).max(axis=1)
        bound = largest * np.float32(0.5 / 127 + 2.0**-10) + np.float32(127 * 2.0**-24)
        return np.repeat(bound, Q8_BLOCK)
    bound = np.abs(values)
    if kind == "F16":
        bound *= np.float32(2.0**-11)
        bound += np.float32(2.0**-25)  # Half the smallest subnormal.
    else:
        bound *= np.float32(2.0**-8)
        bound += np.float32(2.0**-133)
    return bound


def _differs(chunk: Chunk, what: str) -> ModelError:
    name = chunk.placed.tensor.name
    return ModelError(f"verification of tensor {name} failed: {what}", tensor=name)
