"""The input of one `llama_decode`, written through NumPy views of its native arrays.

Owned by the engine thread. A batch is allocated once at its largest size; a step overwrites the
rows that it uses. Filling rows one by one through ctypes would cost more than sampling does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from worker.llama import library


class Batch:
    """Up to `capacity` rows, each one token of one sequence."""

    def __init__(self, capacity: int) -> None:
        self._flat = library.load()
        self.native = self._flat.llama_batch_init(capacity, 0, 1)
        self.capacity = capacity
        as_array = np.ctypeslib.as_array
        self._token = as_array(self.native.token, (capacity,))
        self._pos = as_array(self.native.pos, (capacity,))
        self._n_seq = as_array(self.native.n_seq_id, (capacity,))
        self._logits = as_array(self.native.logits, (capacity,))
        # `seq_id` is an array of pointers to each row's list of sequences: all of them are set
        # once, into one array in which row i owns element i.
        self._seq = np.zeros(capacity, dtype=np.int32)
        address = self._seq.ctypes.data
        pointers = ctypes.cast(self.native.seq_id, ctypes.POINTER(ctypes.c_void_p))
        self._own_pointers = [pointers[i] for i in range(capacity)]
        for row in range(capacity):
            pointers[row] = address + row * self._seq.itemsize
        self._n_seq[:] = 1
        self.n_rows = 0

    def clear(self) -> None:
        self.n_rows = 0

    def add(self, slot: int, position: int, tokens: Sequence[int], *, logits: bool) -> int:
        """Append tokens at consecutive positions; returns the last row.

        `logits` asks for the logits of the last of them.
        """
        start, end = self.n_rows, self.n_rows + len(tokens)
        assert end <= self.capacity, "the scheduler never plans more than the batch holds"
        self._token[start:end] = tokens
        self._pos[start:end] = range(position, position + len(tokens))
        self._seq[start:end] = slot
        self._logits[start:end] = 0
        self._logits[end - 1] = logits
        self.n_rows = end
        return end - 1

    def want_all_logits(self) -> None:
        """Ask for an output at every row, as pooled embeddings and comparisons need it."""
        self._logits[: self.n_rows] = 1

    def close(self) -> None:
        # `llama_batch_free` frees what `llama_batch_init` put there, not our array.
        pointers = ctypes.cast(self.native.seq_id, ctypes.POINTER(ctypes.c_void_p))
        for row, pointer in enumerate(self._own_pointers):
            pointers[row] = pointer
        self._flat.llama_batch_free(self.native)
