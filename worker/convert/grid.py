"""Computes float32 rows from numbers of a few bits and their scales, as quantisers store them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.convert.quantize import to_float32
from worker.convert.safetensors import TensorInfo

Read = Callable[[TensorInfo, int, int], npt.NDArray[Any]]
"""Reads rows of a tensor as stored: (tensor, first row, number of rows)."""
Values = npt.NDArray[np.float32]
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([_FP4, -_FP4])


@dataclass(frozen=True, slots=True)
class Packing:
    """How numbers of `n_bits` bits are packed, the first in the lowest bits: the numbers of a row
    into its bytes, or those of successive rows into I32s."""

    n_bits: int
    across_rows: bool = False
    """Numbers of successive rows are packed together."""
    positions: tuple[int, ...] = ()
    """The positions of the numbers within an I32 or a byte, if they are not in order."""
    is_one_less: bool = False
    """Each is stored minus 1, as zero points are in GPTQ's first format."""

    @property
    def unit(self) -> tuple[int, int]:
        """How many numbers fill how many I32s, or bytes, to the last bit."""
        width = 32 if self.across_rows else 8
        n = lcm(width, self.n_bits)
        return n // self.n_bits, n // width

    def unpacked(self, stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """The numbers in rows of bytes."""
        (n, n_words), mask = self.unit, (1 << self.n_bits) - 1
        is_even = 32 % self.n_bits == 0
        along = 0 if self.across_rows else 1
        if short := -stored.shape[along] % n_words:  # The last unit is not full.
            missing = [(0, 0), (0, 0)]
            missing[along] = 0, short
            stored = np.pad(stored, missing)
        if self.across_rows:
            words, axis = stored.view("<u4").reshape(-1, n_words, stored.shape[1] // 4), 1
        else:
            words, axis = stored.reshape(len(stored), -1, n_words), 2
        if self.is_one_less and is_even:
            # GPTQ subtracted from whole words, so a 0 borrowed from its neighbour.
            words = words + np.uint32(0xFFFFFFFF // mask)
        out = np.empty((*words.shape[:axis], n, *words.shape[axis + 1 :]), np.uint8)
        words, numbers = np.moveaxis(words, axis, 0), np.moveaxis(out, axis, 0)
        width = 8 * words.itemsize
        for i, position in enumerate(self.positions or range(n)):
            word, shift = divmod(position * self.n_bits, width)
            bits = words[word] >> shift
            if shift + self.n_bits > width:
                bits |= words[word + 1] << width - shift
            numbers[i] = bits & mask
        if self.is_one_less and not is_even:
            out += 1
            out &= mask
        return out.reshape(-1, out.shape[2]) if self.across_rows else out.reshape(len(out), -1)


@dataclass(frozen=True, slots=True)
class Grid:
    """A tensor of numbers, each of which belongs to `rows` by `columns` values of a weight."""

    info: TensorInfo
    rows: int = 1
    columns: int = 1
    packing: Packing | None = None
    table: Values | None = None
    """The value of each number. Without it, packed numbers count from the middle of their range."""

    def of_rows(self, read: Read, first: int, count: int) -> Values:
        """The numbers for `count` rows of the weight from `first` on, one row for each."""
        blocks = (first + np.arange(count)) // self.rows
        n, words = self.packing.unit if self.packing and self.packing.across_rows else (1, 1)
        start, end = int(blocks[0]) // n, int(blocks[-1]) // n + 1
        n_words = min(end * words, self.info.n_rows) - start * words
        values = self._values(read(self.info, start * words, n_words))
        is_plain = self.rows == 1 and len(values) == count
        return values if is_plain else values[blocks - start * n]

    def _values(self, stored: npt.NDArray[Any]) -> Values:
        if self.packing is not None:
            stored = self.packing.unpacked(stored)
        if self.packing is not None and self.table is None:
            return stored.astype(np.float32) - np.float32(1 << self.packing.n_bits - 1)
        make = {"F8_E4M3": e4m3, "F8_E8M0": e8m0, "U8": e8m0}.get(self.info.dtype)
        table = make() if make is not None and self.table is None else self.table
        if table is None:
            return to_float32(stored.view(np.int8) if self.info.dtype == "I8" else stored)
        values: Values = table[stored]
        return values


@dataclass(frozen=True, slots=True)
class Scaled:
    """A weight as (numbers - zero) * scale + shift, each part read from a grid."""

    numbers: Grid
    width: int
    """Values per stored row; packing may have padded the row with more numbers."""
    row_length: int
    """Values per row of the weight; if not `width`, the values are cut into rows anew."""
    scale: Grid
    outer: Grid | None = None
    """Scales of the scales."""
    scale_plus: float = 0.0
    """Added to the scales."""
    zero: Grid | None = None
    """Zero points."""
    shift: Grid | None = None
    """Added to the products, as MLX's biases are."""
    order: npt.NDArray[np.int32] | None = None
    """For each column, the column of its scale, if these are not in order."""
    factor: float = 1.0
    """Multiplies all values in the end."""

    def read_rows(self, read: Read, first: int, count: int) -> Values:
        """Rows of the weight; the writer refuses values that are not finite."""
        width = self.width
        if width == self.row_length:
            return self._rows(read, first, count)
        start, end = first * self.row_length, (first + count) * self.row_length
        row = start // width
        values = self._rows(read, row, -(-end // width) - row).reshape(-1)
        return values[start - row * width : end - row * width].reshape(count, -1)

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def _rows(self, read: Read, first: int, count: int) -> Values:
        values = self.numbers.of_rows(read, first, count)[:, : self.width]
        scale = self.scale.of_rows(read, first, count)
        if self.outer is not None:
            outer = self.outer.of_rows(read, first, count)
            is_divisor = self.outer.info.name.endswith("_global_scale")
            scale = scale / outer if is_divisor else scale * outer
        if self.scale_plus:
            scale = scale + np.float32(self.scale_plus)
        if self.zero is not None:
            values -= self._spread(self.zero.of_rows(read, first, count))
        values *= self._spread(scale)
        if self.shift is not None:
            values += self._spread(self.shift.of_rows(read, first, count))
        if self.factor != 1:
            values *= np.float32(self.factor)
        return values

    def _spread(self, columns: Values) -> Values:
        """Expand values for columns of the scales to columns of the weight."""
        if self.order is not None:
            return columns.take(self.order, axis=1)
        return columns.repeat(self.scale.columns, axis=1)[:, : self.width]


@cache
def e8m0() -> Values:
    """The value of each of the 256 E8M0 numbers: powers of two, and NaN."""
    return np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


@cache
def e4m3() -> Values:
    """The value of each of the 256 FP8 E4M3 numbers, a type without infinities."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    values[bits & 127 == 127] = np.nan
    return np.where(bits >> 7, -values, values).astype(np.float32)
