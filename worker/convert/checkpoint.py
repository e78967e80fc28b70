"""A SafeTensors checkpoint on disk: its JSON files, its shards and the bytes of its tensors.

Opening a checkpoint reads and checks the headers; of quantised weights, it also reads the small
tensors that describe them. Tensor bytes are read by position into a buffer, from any thread.
Nothing is memory-mapped: a file that shrinks while it is read raises an error, not SIGBUS.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.convert import forms, scaled
from worker.convert.config import Config
from worker.convert.grid import Scaled
from worker.convert.quantize import TensorType
from worker.convert.safetensors import TensorInfo, read_header
from worker.errors import ModelError, of_file
from worker.models.checkpoint_files import DENSE_MODULES, INDEX, read_json, weight_files, weight_map

READABLE: Mapping[str, str] = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
"""The types that can be converted, each with the NumPy type it is read as: NumPy has no BF16."""
_RAW = "u1"
"""Tensors of any other type are read as bytes."""
_TILE_BYTES, _N_TILES = 8 << 20, 8
"""Size and number of cached tiles. A tile has some rows of a transposed tensor, whose bytes are
scattered over all of the stored one."""


@dataclass(slots=True)
class Checkpoint:
    """A folder with `config.json` and one or many `.safetensors` files.

    Raises:
        ModelError: on opening, when a file is missing, malformed or shorter than it claims.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    _scaled: dict[str, Scaled] = field(default_factory=dict)
    """By name, tensors that are computed from several stored ones."""
    idle: set[str] = field(default_factory=set)
    """Names of all-zero biases, which the model may not have."""
    _tiles: OrderedDict[tuple[str, int], npt.NDArray[Any]] = field(default_factory=OrderedDict)
    """The most recently used, by tensor name and first row."""
    _tiling: threading.Lock = field(default_factory=threading.Lock)
    _files: dict[Path, int] = field(default_factory=dict)
    _json: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        config = read_json(folder / "config.json")
        tensors: dict[str, TensorInfo] = {}
        for shard in weight_files(folder):
            for info in read_header(shard):
                if info.name in tensors:
                    other = tensors[info.name].path.name
                    raise ModelError(f"tensor {info.name} is in both {other} and {shard.name}")
                tensors[info.name] = info
        _check_index(folder, tensors)
        for module in DENSE_MODULES:
            if (path := folder / module / "model.safetensors").is_file():
                for info in read_header(path):
                    name = f"{module}.{info.name}"
                    tensors[name] = replace(info, name=name)
        checkpoint, method = cls(folder, config, tensors), scaled.method_of(Config(config))
        joined = scaled.join(tensors, method, checkpoint._stored_rows)
        checkpoint._scaled, checkpoint.idle = joined
        return checkpoint

    def lossless_type(self) -> TensorType:
        """A type that holds every value of all matrices."""
        types = {i.dtype for i in self.tensors.values() if len(i.shape) > 1 and i.dtype in READABLE}
        return types.pop() if types in ({"BF16"}, {"F16"}) else "F32"

    def read_rows(self, info: TensorInfo, first: int, count: int) -> npt.NDArray[Any]:
        """Rows of a tensor: as stored (BF16 as `uint16`), or as float32 if several make it up."""
        if (made := self._scaled.get(info.name)) is not None:
            return made.read_rows(self._stored_rows, first, count)
        return self._stored_rows(info, first, count)

    def _stored_rows(self, info: TensorInfo, first: int, count: int) -> npt.NDArray[Any]:
        if info.is_transposed:
            return self._transposed_rows(info, first, count)
        data = self._bytes(info, first * info.row_bytes, count * info.row_bytes)
        return data.view(READABLE.get(info.dtype, _RAW)).reshape(count, -1)

    def _bytes(self, info: TensorInfo, first: int, size: int) -> npt.NDArray[np.uint8]:
        with of_file(info.path):
            out = read_bytes(self._file(info.path), size, info.offset + first)
        if out.size < size:
            raise ModelError(
                f"{info.path} became shorter while tensor {info.name} was read", path=str(info.path)
            )
        return out

    def _transposed_rows(self, info: TensorInfo, first: int, count: int) -> npt.NDArray[Any]:
        step, end = max(1, _TILE_BYTES // max(1, info.row_bytes)), first + count
        parts = []
        for start in range(first - first % step, end, step):
            tile = self._tile(info, start, min(step, info.n_rows - start))
            parts.append(tile[max(first - start, 0) : end - start])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _tile(self, info: TensorInfo, start: int, count: int) -> npt.NDArray[Any]:
        """Columns of the stored tensor, as rows."""
        key = info.name, start
        with self._tiling:
            if (tile := self._tiles.get(key)) is None:
                size = info.row_bytes // info.row_length
                stored = np.empty((info.row_length, count), f"<u{size}")
                for i, row in enumerate(stored):
                    first = size * (i * info.n_rows + start)
                    row[:] = self._bytes(info, first, size * count).view(row.dtype)
                tile = np.ascontiguousarray(stored.T).view(READABLE.get(info.dtype, _RAW))
                self._tiles[key] = tile
                if len(self._tiles) > _N_TILES:
                    self._tiles.popitem(last=False)
            self._tiles.move_to_end(key)
            return tile

    def read(self, info: TensorInfo, part: int = 0, n_parts: int = 0) -> npt.NDArray[Any]:
        """A tensor in its own shape, or member `part` of the `n_parts` along its first axis."""
        n_rows = info.n_rows // (n_parts or 1)
        shape = info.shape[1:] if n_parts else info.shape
        return self.read_rows(info, part * n_rows, n_rows).reshape(shape)

    def _file(self, path: Path) -> int:
        # dict.setdefault is atomic; a thread that lost the race closes its own descriptor.
        if (opened := self._files.get(path)) is not None:
            return opened
        mine = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        winner = self._files.setdefault(path, mine)
        if winner != mine:
            os.close(mine)
        return winner

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        self._tiles.clear()

    def json(self, name: str) -> dict[str, Any]:
        """An optional JSON file of the folder, read once; empty if the file is absent."""
        if name not in self._json:
            path = self.folder / name
            found = read_json(path) if path.is_file() else {}
            if found:
                forms.check(path, found)
            self._json[name] = found
        return self._json[name]

    def forget_json(self) -> None:
        """Drop the JSON files read so far: a large tokenizer.json takes more memory than the
        conversion of the weights."""
        self._json.clear()


def _check_index(folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
    index = folder / INDEX
    shards = weight_map(index) if index.is_file() else {}
    if {info.path.name for info in tensors.values()}.isdisjoint(shards.values()):
        return  # There is no index, or it is a leftover that `weight_files` ignores.
    for name, shard in shards.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise ModelError(f"{index} places tensor {name} in {shard}, which does not hold it")


def read_bytes(file: int, size: int, position: int) -> npt.NDArray[np.uint8]:
    """Bytes of an open file; fewer if it ends early. Thread-safe."""
    out, done = np.empty(size, dtype=np.uint8), 0
    while done < size and (count := os.preadv(file, [out.data[done:]], position + done)):
        done += count
    return out[:done]
