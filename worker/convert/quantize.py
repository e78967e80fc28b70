"""Encodes values of a source tensor as a GGUF tensor type, a chunk of rows at a time.

By the `gguf` package's own quantisers, called from the converter's worker threads (NumPy releases
the GIL while it computes).
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

TensorType = str
"""ggml's name of a tensor type; `encode` writes F32, F16, BF16 and Q8_0."""
_STORED = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(np.uint16)}
"""NumPy has no BF16; its bits are the upper half of a float32."""
_EXPONENTS: dict[str, Any] = {
    "F32": np.uint32(0x7F800000),
    "F16": np.uint16(0x7C00),
    "BF16": np.uint16(0x7F80),
}
_Q8_BLOCK, _Q8_BLOCK_BYTES = 32, 34


def tensor_type(wanted: TensorType, shape: tuple[int, ...], keep_f32: bool) -> TensorType:
    """The type to write: F32 for vectors, norms and routers; F16 if a row is no whole number of
    blocks."""
    if keep_f32 or len(shape) < 2:
        return "F32"
    if wanted == "Q8_0" and shape[-1] % _Q8_BLOCK:
        return "F16"
    return wanted


def size_bytes(kind: TensorType, n_elements: int) -> int:
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(n_elements // block * block_bytes)


def to_float32(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Stored values as float32; `uint16` is BF16."""
    if values.dtype == np.uint16:
        wide = values.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return values.astype(np.float32, copy=False)


def is_copied(source: np.dtype[Any], kind: TensorType) -> bool:
    """Whether the output type is the source's type, so that the bytes are copied; as bytes come
    what has its type already."""
    return source == np.uint8 or kind != "Q8_0" and _STORED.get(kind, source) == source


def encode(values: npt.NDArray[Any], kind: TensorType) -> npt.NDArray[np.uint8]:
    """The bytes of `values`, which are whole rows, as tensor type `kind`."""
    if is_copied(values.dtype, kind):
        return values.reshape(-1).view(np.uint8)
    with np.errstate(all="ignore"):  # What does not fit is found by `is_finite`.
        # The package takes a few rows at once, and is slow on a long one.
        rows = to_float32(values).reshape(-1, values.shape[-1])
        encoded = gguf.quantize(rows, gguf.GGMLQuantizationType[kind])
    return np.ascontiguousarray(encoded).view(np.uint8).reshape(-1)


def is_finite(data: npt.NDArray[np.uint8], kind: TensorType) -> bool:
    """Whether the bytes of a tensor hold no infinity and no NaN."""
    if kind == "Q8_0":
        data, kind = np.ascontiguousarray(data.reshape(-1, _Q8_BLOCK_BYTES)[:, :2]), "F16"
    ones = _EXPONENTS[kind]
    return not bool(((data.view(ones.dtype) & ones) == ones).any())


def decode(data: npt.NDArray[np.uint8], kind: TensorType) -> npt.NDArray[np.float32]:
    """The values in the bytes of a tensor, of any type that llama.cpp writes."""
    values = gguf.dequantize(data.reshape(1, -1), gguf.GGMLQuantizationType[kind])
    return np.asarray(values, dtype=np.float32).reshape(-1)
