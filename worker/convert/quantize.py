"""Encodes values of a source tensor as a GGUF tensor type, a chunk of rows at a time.

Pure NumPy, called from the converter's worker threads (NumPy releases the GIL while it computes).
The bits are those of the `gguf` package's own quantisers, whose Q8_0 takes four times as long: with
it, a conversion took 0.62 of the time of llama.cpp's own script; now it takes less than half
(`python -m tools.bench.convert_bench`).
"""

from __future__ import annotations

from functools import cache, reduce
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

TensorType = str
"""ggml's name of a tensor type; `encode` writes F32, F16, BF16 and Q8_0."""
_ENCODED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "Q8_0": np.void}
Q8_BLOCK = 32
Q8_BLOCK_BYTES = 34
_BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))
"""Added before the fraction is cut off, this rounds halves away from zero. One half itself would
also round up the largest number below a half."""


def tensor_type(wanted: TensorType, shape: tuple[int, ...], keep_f32: bool) -> TensorType:
    """The type to write: F32 for vectors, norms and routers; F16 instead of Q8_0 if a row is not a
    whole number of blocks."""
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
    """Whether the bytes are copied: the source has the output type, or its values already come as
    bytes of that type."""
    return source == np.uint8 or kind not in _ENCODED or source == _ENCODED[kind]


def encode(values: npt.NDArray[Any], kind: TensorType) -> npt.NDArray[np.uint8]:
    """The bytes of `values`, which are whole rows, as tensor type `kind`."""
    values = values.reshape(-1)
    if is_copied(values.dtype, kind):
        return values.view(np.uint8)
    if kind == "Q8_0":
        return _to_q8_0(values)
    if kind == "F16" and values.dtype == np.uint16:
        # Faster than by way of float32. "wrap" skips the check of indices, all of which exist.
        return np.take(_bf16_as_f16(), values, mode="wrap").view(np.uint8)
    wide = to_float32(values)
    if kind == "F16":
        with np.errstate(over="ignore"):
            return wide.astype(np.float16).view(np.uint8)
    packed: npt.NDArray[np.uint8] = gguf.quantize(wide, gguf.GGMLQuantizationType[kind])
    return packed.view(np.uint8)


def is_finite(data: npt.NDArray[np.uint8], kind: TensorType) -> bool:
    """Whether the bytes of a tensor hold no infinity and no NaN; true without a check for types
    whose bytes are only ever copied."""
    if kind not in _ENCODED:
        return True
    if kind == "Q8_0":
        data, kind = np.ascontiguousarray(data.reshape(-1, Q8_BLOCK_BYTES)[:, :2]), "F16"
    exponent = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000}[kind]
    n_bits = 32 if kind == "F32" else 16
    # As integers, values that are not finite are the largest of their sign. Two maxima run at the
    # speed of memory; extracting each exponent takes more than ten times as long.
    positive, every = (data.view(f"{sign}{n_bits // 8}").max(initial=0) for sign in "iu")
    return bool(positive < exponent and every < exponent + (1 << n_bits - 1))


@cache
def _bf16_as_f16() -> npt.NDArray[np.uint16]:
    """A table of the F16 for each of the 65,536 BF16 values."""
    every = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(over="ignore"):
        return to_float32(every).astype(np.float16).view(np.uint16)


@np.errstate(divide="ignore", over="ignore", invalid="ignore")
def _to_q8_0(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Blocks of 32 values: a float16 scale, then signed bytes, rounded half away from zero.

    Magnitudes are rounded first. The signs are applied to the bytes, which are a quarter as long.
    """
    scale = block_maximum(values) / np.float32(127)
    inverse = np.float32(1) / scale
    # Without a finite inverse, the float16 scale of the block is zero.
    inverse[np.isinf(inverse)] = 0
    scaled = to_float32(_magnitude_bits(values).view(values.dtype))
    blocks = scaled.reshape(-1, Q8_BLOCK)
    blocks *= inverse[:, None]
    scaled += _BELOW_HALF
    out = np.empty((len(blocks), Q8_BLOCK_BYTES), dtype=np.uint8)
    out[:, :2] = scale.astype(np.float16).reshape(-1, 1).view(np.uint8)
    whole = scaled.astype(np.int8)  # The cast cuts the fraction off.
    # -1 for a negative value, else 0: x ^ -1 is -x - 1, so both steps together negate x.
    signs = values.view(f"i{values.itemsize}") >> (8 * values.itemsize - 1)
    minus = signs.astype(np.int8)
    whole ^= minus
    whole -= minus
    out[:, 2:] = whole.view(np.uint8).reshape(-1, Q8_BLOCK)
    return out.reshape(-1)


def block_maximum(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The largest magnitude in every block of 32 values, which have a type that `to_float32`
    accepts."""
    # Magnitudes of floats have the same order as their bits.
    magnitudes = _magnitude_bits(values.reshape(-1))
    bits = magnitudes.dtype
    # NumPy is fast along long axes only, and transposes faster in words of eight bytes.
    per_word = 8 // values.itemsize
    words = magnitudes.view(np.uint64).reshape(-1, Q8_BLOCK // per_word)
    columns = np.ascontiguousarray(words.T).view(bits)
    in_words = columns.max(axis=0).reshape(-1, per_word)
    return to_float32(reduce(np.maximum, in_words.T).view(values.dtype))


def _magnitude_bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The bits of floats without their signs, as unsigned integers."""
    bits = np.dtype(f"u{values.itemsize}")
    magnitudes: npt.NDArray[Any] = values.view(bits) & bits.type(np.iinfo(bits).max >> 1)
    return magnitudes


def decode(data: npt.NDArray[np.uint8], kind: TensorType) -> npt.NDArray[np.float32]:
    """The values in the bytes of a tensor, of any type that llama.cpp writes."""
    values = gguf.dequantize(data.reshape(1, -1), gguf.GGMLQuantizationType[kind])
    return np.asarray(values, dtype=np.float32).reshape(-1)
