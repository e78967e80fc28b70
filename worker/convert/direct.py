"""Reads and writes of a large file past the page cache, where system and file system allow it.

The weights are read and written once. In the page cache they would displace other data, cost a copy
and, on a virtual machine, the slow first touch of fresh memory. Verification then also reads from
the disk and not from memory. Measured on two cores beside other work, F16 of 0.97 B parameters:
5.9 s so, 11.3 s through the page cache (`python -m tools.bench.convert_bench`, `--plain`).
Thread-safe: every transfer names its position.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 4096
"""Position, length and memory address of a direct transfer must be multiples of this."""


class DirectFile:
    """An existing file; `write` and `read` take any position and length.

    Bytes before and after the whole blocks of a write go through the page cache. Only an fsync
    guarantees that data is on the disk.
    """

    def __init__(self, path: Path, flags: int, *, is_direct: bool = True) -> None:
        self._plain = os.open(path, flags | os.O_CLOEXEC)
        self._direct = _open_direct(path, flags) if is_direct else -1
        self._refused = self._direct < 0
        """Whether direct transfers are impossible here."""

    def close(self) -> None:
        os.close(self._plain)
        if self._direct >= 0:
            os.close(self._direct)

    def write(self, data: npt.NDArray[np.uint8], position: int) -> None:
        begin = min(-position % BLOCK_BYTES, data.size)
        end = begin + (data.size - begin) // BLOCK_BYTES * BLOCK_BYTES
        if self._refused or begin == end:
            _write_all(self._plain, data.data, position)
            return
        middle = _aligned(end - begin)
        middle[:] = data[begin:end]
        try:
            _write_all(self._direct, middle.data, position + begin)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some file systems open a file for direct transfers and then refuse the first one.
            self._refused = True
            _write_all(self._plain, data.data, position)
            return
        _write_all(self._plain, data[:begin].data, position)
        _write_all(self._plain, data[end:].data, position + end)

    def read(self, size_bytes: int, position: int) -> npt.NDArray[np.uint8]:
        """Read up to `size_bytes`; less if the file ends before."""
        skipped = position % BLOCK_BYTES
        wanted = _aligned(-(-(skipped + size_bytes) // BLOCK_BYTES) * BLOCK_BYTES)
        done = 0
        while done < skipped + size_bytes:
            count = self._read(wanted.data[done:], position - skipped + done)
            if count == 0 or count % BLOCK_BYTES:  # The file ends inside this block.
                done += count
                break
            done += count
        return wanted[skipped : min(done, skipped + size_bytes)]

    def _read(self, room: memoryview, position: int) -> int:
        if not self._refused:
            try:
                return os.preadv(self._direct, [room], position)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._refused = True
        return os.preadv(self._plain, [room], position)


def _open_direct(path: Path, flags: int) -> int:
    """A descriptor for direct transfers; -1 where the system has none."""
    if not hasattr(os, "O_DIRECT"):
        return -1
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return -1


def _aligned(size_bytes: int) -> npt.NDArray[np.uint8]:
    room = np.empty(size_bytes + BLOCK_BYTES, dtype=np.uint8)
    first = -room.ctypes.data % BLOCK_BYTES
    return room[first : first + size_bytes]


def _write_all(file: int, view: memoryview, position: int) -> None:
    while len(view):
        count = os.pwrite(file, view, position)
        view, position = view[count:], position + count
