"""Weights stored as small numbers beside scales: FP8 of DeepSeek, Qwen, fbgemm and ModelOpt, NVFP4,
and the formats of compressed-tensors.

Such tensors become one tensor of float32 values, the products that the source's own framework
computes. llama.cpp has a type like NVFP4, but reads the scale of a whole tensor that belongs to it
of some kinds of tensors only, so these weights are written like others. Any other method of a
`quantization_config` is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.convert.config import Config
from worker.convert.quantize import to_float32
from worker.errors import ModelError
from worker.models.safetensors import TensorInfo

Read = Callable[[TensorInfo, int, int], npt.NDArray[Any]]
"""Gives rows of a tensor as they are stored: so many from one on."""

_KNOWN: Mapping[str, tuple[str, Collection[str]]] = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "mxfp4"), ("", ())),
    "modelopt": (
        "quant_algo",
        ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "mxfp4", "MXFP8"),
    ),
    "compressed-tensors": (
        "format",
        (
            *("float-quantized", "naive-quantized", "int-quantized", "pack-quantized"),
            *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
        ),
    ),
}
"""The methods that can be converted, each with the key of its formats, and these."""
_MIXED = {"mixed-precision": "config_groups", "MIXED_PRECISION": "quantized_layers"}
"""Where such a method has its parts, each with a format of its own."""
_NUMBERS = ("F8_E4M3", "I8", "I32", "U8")
"""Types that need a scale; an I32 holds as many integers as go into it, a U8 two FP4."""
_FLOATS = ("BF16", "F16", "F32")
_N_BITS = (2, 4, 8)
"""Of integers in an I32; how those are stored that cross its border has changed."""
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.concatenate([_FP4, -_FP4])
_UNUSED = r".*(\.(input|output|q|k|v)(_global)?|[._]activation)_(scale|zero_point)"
"""What belongs to activations, which are not quantised here."""


@dataclass(frozen=True, slots=True)
class Method:
    """What a configuration says of weights that their tensors do not."""

    blocks: Collection[tuple[int, int]] = ()
    """How many rows and columns share a scale, where a weight's last ones may be fewer."""
    n_bits: Collection[int] = ()
    has_zeros: bool = False
    """Every weight says which number stands for zero."""
    has_powers: bool = False
    """Scales of type U8 are exponents, as in MXFP4 and MXFP8."""
    has_stacks: bool = True
    """Scales of a stack of experts are laid out as those of a matrix are."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Numbers that each belong to so many rows and columns of a weight."""

    info: TensorInfo
    rows: int
    columns: int
    n_bits: int = 0
    """Of integers, if those of successive rows are packed into an I32."""

    def of_rows(self, read: Read, first: int, count: int) -> npt.NDArray[np.float32]:
        """Those of some rows of the weight, in a row each."""
        blocks = (first + np.arange(count)) // self.rows
        n = 32 // self.n_bits if self.n_bits else 1
        start = int(blocks[0]) // n
        stored = read(self.info, start, int(blocks[-1]) // n + 1 - start)
        if self.n_bits:
            columns = np.ascontiguousarray(stored.view("<u4").T).view(np.uint8)
            return _integers(columns, self.n_bits).T[blocks - start * n]
        return _values(stored, self.info.dtype)[blocks - start]


@dataclass(frozen=True, slots=True)
class Scaled:
    """What a weight is made of."""

    numbers: TensorInfo
    width: int
    """Of the weight; there may be more numbers."""
    n_bits: int
    scale: Grid
    whole: Grid | None
    """Scales of the scales."""
    zero: Grid | None
    """The numbers that stand for zero."""
    order: npt.NDArray[np.int32] | None
    """For each column of the weight that of its scales, if these are not in turn."""

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def read_rows(self, read: Read, first: int, count: int) -> npt.NDArray[np.float32]:
        """Its values, of which none that is not finite will be written."""
        stored = read(self.numbers, first, count)
        if self.numbers.dtype == "U8":
            values = _FP4[_parts(stored, 4)]
        elif self.n_bits:
            values = _integers(stored, self.n_bits)[:, : self.width]
        else:
            values = _values(stored, self.numbers.dtype)
        scale = self.scale.of_rows(read, first, count)
        if self.whole is not None:
            whole = self.whole.of_rows(read, first, count)
            is_divisor = self.whole.info.name.endswith("_global_scale")
            scale = scale / whole if is_divisor else scale * whole
        if self.zero is not None:
            values -= self._spread(self.zero.of_rows(read, first, count))
        values *= self._spread(scale)
        return values

    def _spread(self, columns: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Of each column of the weight, from those of its scales."""
        if self.order is not None:
            return columns.take(self.order, axis=1)
        return columns.repeat(self.scale.columns, axis=1)[:, : self.width]


def method_of(config: Config) -> Method:
    """
    Raises:
        ModelError: the weights are quantised by a method that cannot be converted.
    """
    section = config.section("quantization_config")
    if not section.values:
        section = config.section("quantization")  # As MLX has it.
    if not section.values:
        section = config.section("text_config").section("quantization_config")
    if not section.values:
        return Method()
    name = section.text("quant_method", "MLX" if section.has("bits") else "compressed-tensors")
    key, known = _KNOWN.get(name, ("", ()))
    kinds = {section.text(key, "")} if key else set()
    for kind in kinds & _MIXED.keys():
        layers = section.section(_MIXED[kind])
        kinds = {layers.section(each).text(key, "") for each in layers.values}
    if name not in _KNOWN or not kinds <= set(known):
        said = f" ({', '.join(sorted(kinds))})" if kinds - {""} else ""
        raise ModelError(
            f"{config.name}: weights quantised by {name}{said} cannot be converted; fp8, "
            "fbgemm_fp8, mxfp4, ModelOpt's FP8 and FP4, and compressed-tensors' FP8, FP4 and "
            "integers can. Give the checkpoint that was quantised, or a GGUF",
            quant_method=name,
        )
    if section.section("transform_config").values:
        raise ModelError(f"{section.name}: llama.cpp has no transform_config of activations")
    groups = section.section("config_groups")
    weights = [groups.section(each).section("weights") for each in groups.values]
    blocks = [_block(section, "weight_block_size")]
    blocks += [_block(each, "block_structure") for each in weights]
    return Method(
        blocks={each for each in blocks if min(each) > 0},
        n_bits={each.integer("num_bits") for each in weights if each.has("num_bits")},
        has_zeros=bool(weights) and all(each.values.get("symmetric") is False for each in weights),
        has_powers=any(kind.lower().startswith("mx") for kind in kinds),
        has_stacks=name != "fbgemm_fp8",
    )


def _block(section: Config, key: str) -> tuple[int, int]:
    block = section.values.get(key) or [0, 0]
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int for n in block):
        return block[0], block[1]
    raise ModelError(f"{section.name}: {key} must be two numbers, not {block!r:.80}")


def join(tensors: MutableMapping[str, TensorInfo], method: Method, read: Read) -> dict[str, Scaled]:
    """Put weights of type F32 in the places of what they are made of, and leave out what belongs to
    activations. Numbers without a scale are reported only if the model needs the tensor.

    Raises:
        ModelError: scales do not fit their weight, or are of an unknown type.
    """
    made: dict[str, Scaled] = {}
    for numbers in [info for info in tensors.values() if info.dtype in _NUMBERS]:
        name = numbers.name.removesuffix("_packed")
        scale = tensors.get(f"{name}_scale_inv", tensors.get(f"{name}_scale"))
        if scale is None or len(numbers.shape) not in ((2, 3) if method.has_stacks else (2,)):
            continue
        if 0 in numbers.shape:
            raise _unfit(scale, numbers)
        if name in tensors and name != numbers.name:
            raise ModelError(
                f"{numbers.path.parent} has both {name} and {numbers.name}", tensor=name
            )
        weight, n_bits = _weight(name, numbers, tensors, method, read)
        made[name] = _scaled(weight, numbers, n_bits, scale, tensors, method, read)
        ends = ("_shape", _second(weight, numbers), "_zero_point", "_g_idx")
        for used in (numbers.name, scale.name, *(name + end for end in ends)):
            tensors.pop(used, None)
        tensors[name] = weight
    for name in [name for name in tensors if re.fullmatch(_UNUSED, name)]:
        del tensors[name]
    return made


def _weight(
    name: str,
    numbers: TensorInfo,
    tensors: Mapping[str, TensorInfo],
    method: Method,
    read: Read,
) -> tuple[TensorInfo, int]:
    """The weight that numbers are stored of, and the bits of an integer if they are packed."""
    shape, n_bits = numbers.shape, 0
    if numbers.dtype == "U8":
        shape = (*shape[:-1], 2 * shape[-1])
    if numbers.dtype == "I32":
        stated = tensors.get(f"{name}_shape")
        n = len(shape)
        if stated is None or stated.dtype not in ("I32", "I64") or prod(stated.shape) != n:
            raise ModelError(
                f"{numbers.path} lacks {name}_shape, of {n} whole numbers", tensor=name
            )
        stored = read(stated, 0, stated.n_rows).view(f"<i{int(stated.dtype[1:]) // 8}")
        shape = tuple(stored.reshape(-1).tolist())
        words = {n: (*shape[:-1], -(-shape[-1] * n // 32)) for n in method.n_bits}
        fit = [n for n in _N_BITS if words.get(n) == numbers.shape]
        if len(fit) != 1:
            bits = " or ".join(map(str, sorted(method.n_bits))) or "unknown numbers of"
            what = f"integers of {bits} bits in shape {list(numbers.shape)} for {list(shape)}"
            why = "2, 4 and 8 can be converted"
            raise ModelError(f"tensor {numbers.name} has {what}; {why}", tensor=numbers.name)
        n_bits = fit[0]
    return replace(numbers, name=name, dtype="F32", shape=shape), n_bits


def _scaled(
    weight: TensorInfo,
    numbers: TensorInfo,
    n_bits: int,
    scale: TensorInfo,
    tensors: Mapping[str, TensorInfo],
    method: Method,
    read: Read,
) -> Scaled:
    """What a weight is made of, each part checked against its shape."""
    # Other methods pack integers in bytes, too, beside scales of the usual types.
    known = ("F8_E4M3",) if numbers.dtype == "U8" else _FLOATS
    known = (*known, "F8_E8M0", *(("U8",) if method.has_powers else ()))
    grid, whole, zero, order = _grid(scale, weight, known, method.blocks), None, None, None
    second = weight.name + _second(weight, numbers)
    if stored := tensors.get(second):
        whole = _grid(stored, weight, _FLOATS)
    elif scale.dtype == "F8_E4M3":
        raise ModelError(f"{scale.path} lacks tensor {second}", tensor=second)
    if stored := tensors.get(f"{weight.name}_zero_point"):
        zero = _zero(stored, weight, grid, n_bits)
    elif method.has_zeros:
        raise ModelError(f"{scale.path} lacks tensor {weight.name}_zero_point", tensor=weight.name)
    if stored := tensors.get(f"{weight.name}_g_idx"):
        if stored.dtype != "I32" or stored.shape != weight.shape[-1:]:
            raise _unfit(stored, weight)
        order = read(stored, 0, stored.n_rows).view("<i4").reshape(-1)
        is_known = order.min() >= 0 and order.max() < scale.row_length
        if not is_known or set(np.bincount(order).tolist()) != {grid.columns}:
            raise _unfit(stored, weight)
    return Scaled(numbers, weight.row_length, n_bits, grid, whole, zero, order)


def _second(weight: TensorInfo, numbers: TensorInfo) -> str:
    """The end of the name of scales of scales, as compressed-tensors or ModelOpt has it."""
    return "_scale_2" if numbers.name == weight.name else "_global_scale"


def _grid(
    info: TensorInfo,
    weight: TensorInfo,
    known: Collection[str],
    blocks: Collection[tuple[int, int]] = (),
) -> Grid:
    """Blocks as the configuration has them, if there are as many numbers; else one for a whole
    tensor, for each row or for equal parts of a row, by the shape. In a stack, each member has its
    own."""
    if info.dtype not in known:
        why = f"scales by values of type {info.dtype}; {', '.join(known)} are known"
        raise ModelError(f"{info.path}: tensor {info.name} {why}", tensor=info.name)
    n_members, (height, width) = prod(weight.shape[:-2]), weight.shape[-2:]
    found = info.n_rows, info.row_length
    for rows, columns in blocks:  # The last part of an extent may be shorter.
        cut = n_members * -(-height // rows), -(-width // columns)
        if cut == found and (n_members == 1 or height % rows == 0):
            return Grid(info, rows, columns)
    is_one = info.n_rows == 1 or info.n_rows % n_members == 0
    if 0 in found or not is_one or weight.n_rows % info.n_rows or width % info.row_length:
        raise _unfit(info, weight)
    return Grid(info, weight.n_rows // info.n_rows, width // info.row_length)


def _zero(info: TensorInfo, weight: TensorInfo, scale: Grid, n_bits: int) -> Grid:
    """Numbers of one byte, or those of successive rows in an I32 as the weight's in a row."""
    n_bits = n_bits if info.dtype == "I32" else 0
    n, of = (32 // n_bits if n_bits else 1), scale.info
    is_cut = len(of.shape) > 2 and of.shape[-2] % n
    n_rows = -(-of.n_rows // n)
    is_known = info.dtype == "I8" or n_bits
    if not is_known or is_cut or (info.n_rows, info.row_length) != (n_rows, of.row_length):
        raise _unfit(info, weight)
    return Grid(info, scale.rows, scale.columns, n_bits)


def _unfit(info: TensorInfo, weight: TensorInfo) -> ModelError:
    shapes = f"of shape {list(info.shape)} scales no {list(weight.shape)}"
    return ModelError(f"tensor {info.name} {shapes}", tensor=info.name)


def _values(stored: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    table = {"F8_E4M3": _e4m3, "F8_E8M0": _e8m0, "U8": _e8m0}.get(dtype)
    if table is None:
        return to_float32(stored.view(np.int8) if dtype == "I8" else stored)
    values: npt.NDArray[np.float32] = table()[stored]
    return values


def _parts(stored: npt.NDArray[np.uint8], n_bits: int) -> npt.NDArray[np.uint8]:
    """The numbers of so many bits in each row of bytes, the lowest of a byte first."""
    n = 8 // n_bits
    parts = np.empty((*stored.shape, n), np.uint8)
    for i in range(n):
        parts[..., i] = stored >> i * n_bits & (1 << n_bits) - 1
    return parts.reshape(len(stored), -1)


def _integers(stored: npt.NDArray[np.uint8], n_bits: int) -> npt.NDArray[np.float32]:
    """Such numbers, of which the middle one stands for zero."""
    return _parts(stored, n_bits).astype(np.float32) - np.float32(1 << n_bits - 1)


@cache
def _e8m0() -> npt.NDArray[np.float32]:
    """Powers of two, by their exponents."""
    return np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


@cache
def _e4m3() -> npt.NDArray[np.float32]:
    """The value of each of the 256 FP8 E4M3 numbers, a type without infinities."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    values[bits & 127 == 127] = np.nan
    return np.where(bits >> 7, -values, values).astype(np.float32)
