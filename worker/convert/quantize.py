"""Encodes values of a source tensor as a GGUF tensor type, a chunk of rows at a time.

Pure NumPy, called from the converter's worker threads (NumPy releases the GIL while it computes).
The result has the same bits as that of the `gguf` package's own quantisers, of which Q8_0 takes
six times as long: with it a conversion takes more than half of the time of llama.cpp's own script
(`python -m tools.bench.convert_bench`).
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

TensorType = str
"""ggml's name of a tensor type; `encode` writes F32, F16, BF16 and Q8_0."""
_ENCODED = ("F32", "F16", "BF16", "Q8_0")
Q8_BLOCK = 32
Q8_BLOCK_BYTES = 34
_BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))
"""Added before the fraction is cut off, this rounds halves away from zero. One half itself would
also round up the largest number below a half."""


def tensor_type(wanted: TensorType, shape: tuple[int, ...], keep_f32: bool) -> TensorType:
    """The type to write: F32 for vectors, norms and routers; F16 if a row is no whole number of
    blocks."""
    if keep_f32 or len(shape) < 2:
        return "F32"
    if wanted == "Q8_0" and shape[-1] % Q8_BLOCK:
        return "F16"
    return wanted


def size_bytes(kind: TensorType, n_elements: int) -> int:
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(n_elements // block * block_bytes)


def to_float32(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Stored values as float32. `uint16` is BF16, whose bits are the upper half of a float32."""
    if values.dtype == np.uint16:
        wide = values.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return values.astype(np.float32, copy=False)


def is_copied(source: np.dtype[Any], kind: TensorType) -> bool:
    """Whether the output type is the source's type, so that the bytes are copied; as bytes come
    what has its type already."""
    return (
        source == np.uint8
        or kind not in _ENCODED
        or (source, kind)
        in (
            (np.dtype(np.uint16), "BF16"),
            (np.dtype(np.float16), "F16"),
            (np.dtype(np.float32), "F32"),
        )
    )


def encode(values: npt.NDArray[Any], kind: TensorType) -> npt.NDArray[np.uint8]:
    """The bytes of `values`, which are whole rows, as tensor type `kind`."""
    values = values.reshape(-1)
    if is_copied(values.dtype, kind):
        return values.view(np.uint8)
    if kind == "Q8_0":
        return _to_q8_0(values)
    wide = to_float32(values)
    if kind == "F16":
        with np.errstate(over="ignore"):
            return wide.astype(np.float16).view(np.uint8)
    if kind == "BF16":
        return _to_bf16(wide).view(np.uint8)
    return wide.view(np.uint8)


def is_finite(data: npt.NDArray[np.uint8], kind: TensorType) -> bool:
    """Whether the bytes of a tensor hold no infinity and no NaN."""
    if kind == "Q8_0":
        data, kind = np.ascontiguousarray(data.reshape(-1, Q8_BLOCK_BYTES)[:, :2]), "F16"
    exponents: dict[str, Any] = {
        "F16": np.uint16(0x7C00),
        "BF16": np.uint16(0x7F80),
        "F32": np.uint32(0x7F800000),
    }
    ones = exponents[kind]
    return not bool(((data.view(ones.dtype) & ones) == ones).any())


def _to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even; a NaN becomes a quiet NaN."""
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if nan.any():
        rounded = np.where(nan, bits | np.uint32(0x00400000), rounded)
    return (rounded >> 16).astype(np.uint16)


def _to_q8_0(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Blocks of 32 values: a float16 scale, then signed bytes, rounded half away from zero."""
    wide = to_float32(values)
    largest = np.maximum.reduceat(np.abs(wide), np.arange(0, wide.size, Q8_BLOCK))
    scale = largest.reshape(-1, 1) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.float32(1) / scale
        # Without a finite inverse, the float16 scale of the block is zero.
        inverse[np.isinf(inverse)] = 0
        blocks = wide.reshape(-1, Q8_BLOCK) * inverse
        blocks += np.copysign(_BELOW_HALF, blocks)
        out = np.empty((len(blocks), Q8_BLOCK_BYTES), dtype=np.uint8)
        out[:, :2] = scale.astype(np.float16).view(np.uint8)
        out[:, 2:] = blocks.astype(np.int8).view(np.uint8)  # The cast cuts the fraction off.
    return out.reshape(-1)


def decode(data: npt.NDArray[np.uint8], kind: TensorType) -> npt.NDArray[np.float32]:
    """The values in the bytes of a tensor, of any type that llama.cpp writes."""
    if kind == "F32":
        return data.view(np.float32)
    if kind == "F16":
        return data.view(np.float16).astype(np.float32)
    if kind == "BF16":
        return to_float32(data.view(np.uint16))
    if kind != "Q8_0":
        quantised = gguf.dequantize(data.reshape(1, -1), gguf.GGMLQuantizationType[kind])
        return np.asarray(quantised, dtype=np.float32).reshape(-1)
    blocks = data.reshape(-1, Q8_BLOCK_BYTES)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= scale
    return values.reshape(-1)
