"""Reads, changes and writes files of checkpoints, and runs the converter."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.gguf_file import finish
from worker.commands import convert as cli

SIZES = {"BF16": 2, "F32": 4, "U32": 4, "F8_E4M3": 1}
Tensor = tuple[str, str, Sequence[int], bytes]
"""Name, type, shape and values."""


def converted(source: Path, target: Path, *flags: str) -> Path:
    assert cli.run([str(source), str(target), *flags, "--progress", "none"]) == 0
    return target


def verified(source: Path, target: Path, *flags: str) -> int:
    """Return the exit status of `verify`."""
    return cli.run(["verify", str(source), str(target), *flags, "--progress", "none"])


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return a SafeTensors file's header, and the data after it."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


@contextmanager
def rewritten(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the object in a JSON file, and write it back with its changes."""
    content = json.loads(path.read_text("utf-8"))
    yield content
    path.write_text(json.dumps(content), "utf-8")


def edit(path: Path, **values: object) -> None:
    with rewritten(path) as content:
        content |= values


def rename(path: Path, old: str, new: str) -> None:
    """Rename the tensors of a SafeTensors file."""
    header, data = read(path)
    write(path, {name.replace(old, new): entry for name, entry in header.items()}, data)


def leave_out(folder: Path, *names: str) -> None:
    for path in folder.glob("*.safetensors"):
        write_tensors(path, [each for each in read_tensors(path) if each[0] not in names])


def read_tensors(path: Path) -> Iterator[Tensor]:
    header, data = read(path)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        yield name, entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]


def write(path: Path, header: dict[str, Any], data: bytes = b"", n_bytes: int = 0) -> None:
    """Write a file, with a hole after the data if `n_bytes` is larger."""
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)
        file.truncate(8 + len(text) + max(len(data), n_bytes))


def write_tensors(path: Path, tensors: Iterable[Tensor]) -> None:
    header: dict[str, Any] = {}
    data = bytearray()
    for name, dtype, shape, values in tensors:
        offsets = [len(data), len(data) + len(values)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += values
    write(path, header, bytes(data))


def write_hollow(
    path: Path,
    weights: Iterable[tuple[str, tuple[int, ...]]],
    dtype: str = "BF16",
    others: Mapping[str, str] = {},
) -> None:
    """Write weights with names, types and shapes, but in a sparse file without data; `others` have
    types of their own."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in weights:
        kind = others.get(name, dtype)
        start, end = end, end + SIZES[kind] * math.prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    write(path, header, n_bytes=end)


def write_importance(path: Path, weights: dict[str, np.ndarray], n_counted: int = 1) -> None:
    """Write an importance matrix like llama.cpp's own tool."""
    writer = gguf.GGUFWriter(path, "imatrix")
    for name, values in weights.items():
        writer.add_tensor(f"{name}.in_sum2", values.astype(np.float32)[None])
        writer.add_tensor(f"{name}.counts", np.full((1, 1), n_counted, np.float32))
    finish(writer)
