"""Weights stored as FP8 or INT8 beside their scales: FP8 of DeepSeek and Qwen, ModelOpt,
compressed-tensors.

A quantised tensor and its scale become one tensor of float32 values, the products that the source's
own framework computes. Any other method of a `quantization_config` is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.convert.config import Config
from worker.convert.quantize import to_float32
from worker.errors import ModelError

QUANTISED = ("F8_E4M3", "I8")
"""Types whose values need a scale."""
POWER = "F8_E8M0"
"""A type of scales alone: a power of two, by its exponent."""
_SCALES = ("_scale_inv", "_scale")
_FORMATS = ("float-quantized", "naive-quantized", "int-quantized")
"""Formats of compressed-tensors that store one byte per value, symmetrically."""
_STRUCTURE = "block_structure"
"""What they call the sizes of a block."""
UNUSED = r".*(\.(input|output|k|v)|[._]activation)_scale"
"""Scales of activations, which are not quantised here."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The values of a scale, and how many rows and columns of the weight each value covers."""

    values: npt.NDArray[np.float32]
    rows: int
    columns: int

    def applied(self, raw: npt.NDArray[np.uint8], dtype: str, first: int) -> npt.NDArray[Any]:
        """Dequantise rows of a weight; `raw` begins at row `first`."""
        wide = _e4m3()[raw] if dtype == "F8_E4M3" else raw.view(np.int8).astype(np.float32)
        rows = (first + np.arange(len(raw))) // self.rows
        scale = np.repeat(self.values[rows], self.columns, axis=1)
        return wide * scale[:, : raw.shape[1]]


def check_method(config: Config) -> tuple[int, int]:
    """The block size of the scales; (0, 0) if the scale's shape tells it.

    Raises:
        ModelError: the weights are quantised by a method that cannot be converted.
    """
    section = config.section("quantization_config")
    if not section.values:
        section = config.section("quantization")  # As MLX has it.
    if not section.values:
        section = config.section("text_config").section("quantization_config")
    if not section.values:
        return 0, 0
    method = section.text("quant_method", "MLX" if section.has("bits") else "compressed-tensors")
    if method == "fp8":
        return _block(section, "weight_block_size")
    key = {"compressed-tensors": "format", "modelopt": "quant_algo"}.get(method, "")
    kind = section.text(key, "")
    if method == "modelopt" and kind == "FP8":
        return 0, 0
    if method == "compressed-tensors" and kind in _FORMATS:
        groups = section.section("config_groups")
        blocks = [_block(groups.section(g).section("weights"), _STRUCTURE) for g in groups.values]
        return max(blocks, default=(0, 0))
    if method == "mxfp4":
        return 0, 0
    raise ModelError(
        f"{config.name}: weights quantised by {method}{f' ({kind})' if kind else ''} cannot be "
        "converted; fp8, mxfp4, ModelOpt's FP8 and compressed-tensors' FP8 and INT8 can. "
        "Give the checkpoint that was quantised, or a GGUF",
        quant_method=method,
    )


def _block(section: Config, key: str) -> tuple[int, int]:
    block = section.values.get(key) or [0, 0]
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int for n in block):
        return block[0], block[1]
    raise ModelError(f"{section.name}: {key} must be two numbers, not {block!r:.80}")


def scale_values(stored: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    if dtype != POWER:
        return to_float32(stored)
    values = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
    return np.where(stored == 255, np.float32(np.nan), values)


def scale_name(weight: str, names: Mapping[str, Any]) -> str:
    """The name of a weight's scale among these names; empty if there is none."""
    return next((weight + scale for scale in _SCALES if weight + scale in names), "")


def scale_of(
    values: npt.NDArray[np.float32], shape: tuple[int, ...], block: tuple[int, int], name: str
) -> Scale:
    """The scale of each block, if there are as many `values`; else of a whole tensor, of each row
    or of equal parts of a row, by the shape of `values`. In a stack, each member has its own."""
    if len(shape) == 3 and len(values.shape) and len(values) == shape[0]:
        members = [scale_of(each, shape[1:], block, name) for each in values]
        if shape[1] % members[0].rows == 0:
            return replace(members[0], values=np.concatenate([m.values for m in members]))
    grid = values.reshape(1, 1) if values.size == 1 else values.reshape(values.shape[0], -1)
    if min(block) > 0:  # The last part of an extent may be shorter.
        n_parts = tuple(-(-extent // size) for extent, size in zip(shape, block, strict=True))
        if grid.shape == n_parts:
            return Scale(grid, *block)
    if any(extent % n for extent, n in zip(shape, grid.shape, strict=True)):
        raise ModelError(f"tensor {name} of shape {list(values.shape)} scales no {list(shape)}")
    return Scale(grid, shape[0] // grid.shape[0], shape[1] // grid.shape[1])


@cache
def _e4m3() -> npt.NDArray[np.float32]:
    """The value of each of the 256 FP8 E4M3 numbers, a type without infinities."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    values[bits & 127 == 127] = np.nan
    return np.where(bits >> 7, -values, values).astype(np.float32)
