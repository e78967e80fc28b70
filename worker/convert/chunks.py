"""Works on tensors in chunks of rows, on a few threads, with bounded memory.

A chunk is a quarter of a million values: its source, its float32 form and its result stay in the
processor's caches. Threads take chunks in file order, so reads and writes stay sequential.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy.typing as npt

from worker.convert.checkpoint import Checkpoint
from worker.convert.output import PlacedTensor
from worker.convert.tensor_plan import RowSpan

CHUNK_ELEMENTS = 1 << 18

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Rows of one piece, and the place of their bytes in the output."""

    placed: PlacedTensor
    piece: RowSpan | None
    """`None` for a tensor whose values are computed from the configuration."""
    first_row: int
    n_rows: int
    offset: int
    size_bytes: int

    def source(self, checkpoint: Checkpoint) -> npt.NDArray[Any]:
        """The source values of this chunk, as stored."""
        if self.piece is not None:
            return self.piece.read(checkpoint, self.first_row, self.n_rows)
        assert self.placed.tensor.values is not None
        return self.placed.tensor.values


def chunks(placed: Iterable[PlacedTensor]) -> Iterator[RowChunk]:
    for tensor in placed:
        yield from _of_tensor(tensor)


def _of_tensor(placed: PlacedTensor) -> Iterator[RowChunk]:
    tensor = placed.tensor
    if tensor.values is not None:
        yield RowChunk(placed, None, 0, tensor.n_elements, placed.offset, placed.size_bytes)
        return
    # Whole rows are whole blocks of every type, so the byte count per row is exact.
    row_bytes = placed.size_bytes * tensor.row_length // tensor.n_elements
    offset = placed.offset
    for piece in tensor.pieces:
        rows = _rows_at_once(piece, tensor.row_length)
        for first in range(0, piece.n_rows, rows):
            count = min(rows, piece.n_rows - first)
            yield RowChunk(placed, piece, first, count, offset, count * row_bytes)
            offset += count * row_bytes


def _rows_at_once(piece: RowSpan, row_length: int) -> int:
    if piece.make is not None:
        return piece.n_rows  # `make` computes all rows at once.
    rows = max(1, CHUNK_ELEMENTS // row_length)
    if piece.head_rows:
        rows = max(1, rows // piece.head_rows) * piece.head_rows
    return rows


def run(
    work: Callable[[RowChunk], None],
    todo: Iterator[RowChunk],
    on_done: Callable[[int], None],
    n_threads: int | None = None,
) -> None:
    """Call `work` on every chunk; `on_done` gets the bytes done so far, on the calling thread.

    The default is one thread more than there are processors, as some always wait for the disk. The
    first exception stops all threads and is raised here.
    """
    _keep_freed_memory()
    pool = _Pool(work, todo)
    threads = [
        threading.Thread(target=pool.serve, name=f"convert-{i}", daemon=True)
        for i in range(n_threads or n_cpus() + 1)
    ]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            next((t for t in threads if t.is_alive()), threads[0]).join(0.05)
            on_done(pool.done_bytes)
    finally:
        pool.stop()
        for thread in threads:
            thread.join()
    if pool.error is not None:
        raise pool.error
    on_done(pool.done_bytes)


@cache
def _keep_freed_memory() -> None:
    """Let glibc reuse a chunk's buffers for the next chunk.

    Returning memory to the kernel and getting new pages costs more than the conversion itself.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 26)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 27)


class _Pool:
    """The chunks left to do and the first error, shared by all threads."""

    def __init__(self, work: Callable[[RowChunk], None], todo: Iterator[RowChunk]) -> None:
        self._work = work
        self._todo = todo
        self._lock = threading.Lock()
        self._stopped = False
        self.done_bytes = 0
        self.error: BaseException | None = None

    def serve(self) -> None:
        while True:
            with self._lock:
                chunk = None if self._stopped else next(self._todo, None)
            if chunk is None:
                return
            try:
                self._work(chunk)
            except BaseException as error:  # Raised again in the thread that called `run`.
                with self._lock:
                    self._stopped = True
                    self.error = self.error or error
                return
            with self._lock:
                self.done_bytes += chunk.size_bytes

    def stop(self) -> None:
        with self._lock:
            self._stopped = True


def n_cpus() -> int:
    """The number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
