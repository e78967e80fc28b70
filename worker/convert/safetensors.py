"""Reads the header of a SafeTensors file: which tensors it holds, and where.

The header is checked against the file's size; tensor bytes are not read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from worker.errors import ModelError

_ITEM_BITS: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits per value of every SafeTensors type; tensors that the model does not use may have any."""
_MAX_HEADER_BYTES = 100 << 20
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class _Entry(msgspec.Struct):
    """A tensor's entry in the header."""

    dtype: str
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Count, _Count]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The place of one tensor in its file; `shape` is row-major, as in the framework that wrote
    it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    size_bytes: int
    is_transposed: bool = False
    """The rows of this matrix are the columns of the one in the file."""

    @property
    def n_rows(self) -> int:
        """The number of rows. A vector counts as a column: it is split and permuted like a
        matrix."""
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else math.prod(self.shape)

    @property
    def row_length(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def row_bytes(self) -> int:
        return self.row_length * _ITEM_BITS[self.dtype] // 8


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of one SafeTensors file, checked against the file's size."""

    def error(what: str) -> ModelError:
        return ModelError(f"{path} is not a sound SafeTensors file: {what}", path=str(path))

    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                raise error("it is empty; its download may have failed")
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise error(f"its header claims {length} bytes, the file has {size}")
            header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    except OSError as failure:
        raise ModelError(f"{path} cannot be read: {failure.strerror}", path=str(path)) from None
    except (ValueError, RecursionError):
        raise error("its header is not a JSON object") from None
    header.pop("__metadata__", None)
    data_bytes = size - 8 - length
    infos = [_tensor(path, 8 + length, data_bytes, name, e) for name, e in header.items()]
    infos.sort(key=lambda info: (info.offset, info.size_bytes))
    end = 8 + length
    for info in infos:
        if info.offset != end:
            raise error(f"the bytes of tensor {info.name} overlap or leave a gap before them")
        end += info.size_bytes
    if end != size:
        raise error(f"{size - end} bytes at its end belong to no tensor")
    return infos


def _tensor(path: Path, base: int, data_bytes: int, name: str, raw: msgspec.Raw) -> TensorInfo:
    def error(what: str) -> ModelError:
        return ModelError(f"{path}: tensor {name} {what}", path=str(path), tensor=name)

    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except ValueError as fault:
        raise error(f"has no valid entry in the header: {fault}") from None
    if entry.dtype not in _ITEM_BITS:
        raise error(f"has type {entry.dtype}, which SafeTensors does not have")
    begin, end = entry.data_offsets
    if begin > end:
        raise error("has no valid data_offsets")
    if end > data_bytes:
        raise ModelError(
            f"{path} is truncated: tensor {name} ends at byte {base + end}, "
            f"the file has {base + data_bytes} bytes",
            path=str(path),
            needed_bytes=base + end,
            available_bytes=base + data_bytes,
        )
    if 8 * (end - begin) != math.prod(entry.shape) * _ITEM_BITS[entry.dtype]:
        shape = list(entry.shape)
        raise error(f"of shape {shape} and type {entry.dtype} cannot have {end - begin} bytes")
    return TensorInfo(name, entry.dtype, entry.shape, path, base + begin, end - begin)
