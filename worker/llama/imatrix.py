"""Importance matrices: how much each input of a tensor matters, as llama.cpp's tool measures it.

Reads both of the tool's file formats. Runs in the quantiser's process.
"""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from worker.errors import ModelError

Importance = dict[str, npt.NDArray[np.float32]]
_SUMS, _COUNTS = ".in_sum2", ".counts"


def read(path: Path) -> Importance:
    """Mean squared activations by tensor name.

    Raises:
        ModelError: the file has neither format, or is damaged.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        found = _read_gguf(path) if magic == b"GGUF" else _read_legacy(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", path=str(path)) from None
    except (struct.error, ValueError, LookupError):
        raise ModelError(f"{path} is not an importance matrix", path=str(path)) from None
    if not found or not all(np.isfinite(weights).all() for weights in found.values()):
        raise ModelError(f"{path} lacks finite importance values", path=str(path))
    return found


def _read_gguf(path: Path) -> Importance:
    tensors = {t.name: np.asarray(t.data, dtype=np.float32) for t in gguf.GGUFReader(path).tensors}
    found: Importance = {}
    for name, sums in tensors.items():
        if not name.endswith(_SUMS):
            continue
        base = name.removesuffix(_SUMS)
        counts = tensors[base + _COUNTS].reshape(-1)
        rows = sums.reshape(len(counts), -1)  # One row per expert.
        seen = counts > 0
        mean = np.ones_like(rows)
        mean[seen] = rows[seen] / counts[seen, None]
        found[base] = np.ascontiguousarray(mean.reshape(-1))
    return found


def _read_legacy(data: bytes) -> Importance:
    """Read the older format: a number of entries, each a name, a number of calls and values."""
    (n_entries,) = struct.unpack_from("<i", data)
    position = 4
    found: Importance = {}
    if not 0 < n_entries < 1 << 20:
        raise ValueError("not a count")
    for _ in range(n_entries):
        (length,) = struct.unpack_from("<i", data, position)
        if not 0 < length < 1 << 12:
            raise ValueError("not a name")
        name = data[position + 4 : position + 4 + length].decode("utf-8")
        position += 4 + length
        n_calls, n_values = struct.unpack_from("<ii", data, position)
        position += 8
        if n_values < 0:  # NumPy would read all that is left
            raise ValueError("not a count")
        values = np.frombuffer(data, dtype=np.float32, count=n_values, offset=position)
        position += 4 * n_values
        found[name] = values / np.float32(max(n_calls, 1))
    return found
