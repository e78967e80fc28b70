"""Works on tensors in chunks of rows, on a few threads, with bounded memory.

A chunk has a quarter of a million values, so its source, its float32 form and its result stay in
the processor's caches. It is larger only if a row or rotary head is, or if `RowSpan.make` computes
all rows at once. Threads take chunks in file order, so reads and writes stay sequential.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.convert.checkpoint import Checkpoint
from worker.convert.quantize import to_float32
from worker.convert.tensor_plan import OutputTensor, RowSpan

CHUNK_ELEMENTS = 1 << 18
_LARGE_BYTES = 16 << 20
"""Larger chunks, such as a tensor whose rows are computed at once, are processed one at a time."""

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Rows of one piece, and where their bytes are in the output."""

    tensor: OutputTensor
    piece: RowSpan
    first_row: int
    n_rows: int
    offset: int
    size_bytes: int

    def parts(self, checkpoint: Checkpoint) -> Iterator[tuple[npt.NDArray[Any], int, int]]:
        """Yield the values to write, in a stored type or as float32: a few rows at a time, with the
        offset and number of their bytes."""
        values = self.piece.read(checkpoint, self.first_row, self.n_rows)
        row_bytes = self.size_bytes // self.n_rows
        step = max(1, CHUNK_ELEMENTS // self.tensor.row_length)
        for first in range(0, self.n_rows, step):
            rows = values[first : first + step]
            if self.tensor.plus:
                rows = to_float32(rows) + np.float32(self.tensor.plus)
            yield rows, self.offset + first * row_bytes, len(rows) * row_bytes


def chunks(tensors: Iterable[OutputTensor]) -> Iterator[RowChunk]:
    for tensor in tensors:
        offset = tensor.offset
        # Whole rows are whole blocks of every type, so the byte count per row is exact.
        row_bytes = tensor.size_bytes * tensor.row_length // tensor.n_elements
        for piece in tensor.pieces:
            rows = _rows_at_once(piece, tensor.row_length)
            for first in range(0, piece.n_rows, rows):
                count = min(rows, piece.n_rows - first)
                yield RowChunk(tensor, piece, first, count, offset, count * row_bytes)
                offset += count * row_bytes


def _rows_at_once(piece: RowSpan, row_length: int) -> int:
    if piece.make is not None:
        return piece.n_rows  # `make` computes all rows at once.
    rows = max(1, CHUNK_ELEMENTS // row_length)
    if piece.head_rows:
        rows = max(1, rows // piece.head_rows) * piece.head_rows
    return rows


Work = Callable[[OutputTensor, npt.NDArray[Any], int, int], None]
"""Gets rows of a tensor's values, and the offset and number of their bytes in the output."""


def run(
    work: Work,
    tensors: Sequence[OutputTensor],
    checkpoint: Checkpoint,
    on_done: Callable[[int, int], None],
    n_threads: int | None = None,
) -> None:
    """Call `work` on all values of the tensors; `on_done` gets the number of bytes done and the
    total, on the calling thread.

    The default is one thread more than there are processors, as some always wait for the disk. The
    first exception stops all threads and is raised here.
    """
    _keep_freed_memory()
    lock, large = threading.Lock(), threading.Lock()
    stopped, done_bytes = threading.Event(), 0
    todo, total = chunks(tensors), sum(t.size_bytes for t in tensors)

    def serve() -> None:
        nonlocal done_bytes
        while not stopped.is_set():
            with lock:
                chunk = next(todo, None)
            if chunk is None:
                return
            # Two of them at once would take the memory of two tensors.
            with large if chunk.size_bytes > _LARGE_BYTES else contextlib.nullcontext():
                for values, offset, size in chunk.parts(checkpoint):
                    work(chunk.tensor, values, offset, size)
            with lock:
                done_bytes += chunk.size_bytes

    n_threads = n_threads or n_cpus() + 1
    with ThreadPoolExecutor(n_threads, thread_name_prefix="convert") as pool:
        try:
            running = {pool.submit(serve) for _ in range(n_threads)}
            on_done(0, total)
            while running:
                ended, running = wait(running, 0.05, FIRST_EXCEPTION)
                for future in ended:
                    future.result()
                on_done(done_bytes, total)
        finally:
            stopped.set()


@cache
def _keep_freed_memory() -> None:
    """Let glibc reuse a chunk's buffers for the next chunk.

    Returning memory to the kernel and getting new pages costs more than the conversion itself.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 26)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 27)


def n_cpus() -> int:
    """The number of processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # other systems lack it, and some sandboxes forbid it
        return os.cpu_count() or 1
