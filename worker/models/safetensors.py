"""Reads the header of a SafeTensors file: which tensors it holds, and where.

The header is checked against the file's size; tensor bytes are not read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise error(f"its header claims {length} bytes, the file has {size}")
            header = json.loads(file.read(length).decode("utf-8"))
    except OSError as failure:
        raise ModelError(f"{path} cannot be read: {failure.strerror}", path=str(path)) from None
    except (ValueError, RecursionError):
        raise error("its header is not JSON") from None
    if not isinstance(header, dict):
        raise error("its header is not a JSON object")
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


def _tensor(path: Path, base: int, data_bytes: int, name: str, entry: object) -> TensorInfo:
    def error(what: str) -> ModelError:
        return ModelError(f"{path}: tensor {name} {what}", path=str(path), tensor=name)

    if not isinstance(entry, dict):
        raise error("has no dtype, shape and data_offsets")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
        raise error(f"has type {dtype}, which SafeTensors does not have")
    if not _whole_numbers(shape):
        raise error("has no valid shape")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise error("has no valid data_offsets")
    begin, end = offsets
    if end > data_bytes:
        raise ModelError(
            f"{path} is truncated: tensor {name} ends at byte {base + end}, "
            f"the file has {base + data_bytes} bytes",
            path=str(path),
            needed_bytes=base + end,
            available_bytes=base + data_bytes,
        )
    if len(shape) > 8 or 8 * (end - begin) != math.prod(shape) * _ITEM_BITS[dtype]:
        raise error(f"of shape {shape} and type {dtype} cannot take {end - begin} bytes")
    return TensorInfo(name, dtype, tuple(shape), path, base + begin, end - begin)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 48 for n in value)
