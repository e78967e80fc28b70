"""The tensor table of a GGUF file: each tensor's type, shape and position, checked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from worker.models.gguf.constants import constants
from worker.models.gguf.faults import unusable

Row = tuple[str, tuple[int, ...], int, int]
"""An entry in the file: name, shape, type number, offset in the data section."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    type_name: str
    shape: tuple[int, ...]
    """In GGUF's order: the fastest-varying dimension first."""
    offset: int
    """From the start of the file."""
    n_bytes: int

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


@cache
def tensor_types() -> dict[int, tuple[str, int, int]]:
    """For each GGML type number: name, elements per block, bytes per block."""
    sizes = constants().GGML_QUANT_SIZES
    types = {int(t): (str(t.name), *sizes[t]) for t in constants().GGMLQuantizationType}
    # NOTE: the pinned llama.cpp loads this type; the released gguf package does not list it yet.
    types.setdefault(42, ("Q2_0", 64, 18))
    return types


def place_tensors(
    path: Path, rows: Iterable[Row], *, data_offset: int, alignment: int, size: int
) -> tuple[TensorEntry, ...]:
    """The entries of the rows; raises `ModelError` unless all have known types and whole blocks and
    lie inside the file, in order and without gaps."""
    seen: set[str] = set()
    placed: list[TensorEntry] = []
    expected = 0
    for name, shape, kind, offset in rows:
        if name in seen:
            raise unusable(path, f"the tensor {name!r} occurs twice")
        seen.add(name)
        type_name, n_bytes = _measure(path, name, shape, kind)
        if offset != expected:
            raise unusable(
                path,
                f"tensor {name!r} lies at offset {offset} of the data instead of {expected}",
            )
        start = data_offset + offset
        if start + n_bytes > size:
            raise unusable(
                path,
                f"it is truncated: tensor {name!r} ends at byte {start + n_bytes}, "
                f"the file after {size}",
            )
        placed.append(TensorEntry(name, type_name, shape, start, n_bytes))
        expected = offset + padded(n_bytes, alignment)
    return tuple(placed)


def _measure(path: Path, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
    types = tensor_types()
    if kind not in types:
        raise unusable(path, f"tensor {name!r} has the unknown type {kind}")
    type_name, per_block, block_bytes = types[kind]
    n_elements = math.prod(shape)
    if not 0 < n_elements < 2**63:
        raise unusable(path, f"tensor {name!r} has the impossible shape {list(shape)}")
    row = shape[0] if shape else 1
    if row % per_block:
        raise unusable(
            path,
            f"tensor {name!r} of type {type_name} has rows of {row} elements, "
            f"not a multiple of its block of {per_block}",
        )
    return type_name, n_elements // per_block * block_bytes


def padded(size: int, alignment: int) -> int:
    """`size` rounded up to the next multiple of `alignment`."""
    return -(-size // alignment) * alignment
