"""The input of one `llama_decode`, written through NumPy views of its native arrays.

Owned by the engine thread. A batch is allocated once at its largest size. Rows are gathered in
lists and written together: one by one, through ctypes or NumPy, they would cost more than sampling.
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
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._outputs: list[bool] = []

    @property
    def n_rows(self) -> int:
        return len(self._tokens)

    def clear(self) -> None:
        for rows in (self._tokens, self._positions, self._slots, self._outputs):
            rows.clear()

    def add(self, slot: int, position: int, tokens: Sequence[int], *, logits: bool) -> int:
        """Append tokens at consecutive positions; returns the last row.

        `logits` asks for the logits of the last of them.
        """
        n = len(tokens)
        assert self.n_rows + n <= self.capacity, "the scheduler never plans more than it holds"
        self._tokens += tokens
        self._positions += range(position, position + n)
        self._slots += [slot] * n
        self._outputs += [False] * (n - 1) + [logits]
        return self.n_rows - 1

    def want_all_logits(self) -> None:
        """Ask for an output at every row, as pooled embeddings and comparisons need it."""
        self._outputs = [True] * self.n_rows

    def write(self) -> None:
        """Bring the rows into the native arrays: one copy an array, whatever the rows are."""
        n = self.native.n_tokens = self.n_rows
        self._token[:n] = self._tokens
        self._pos[:n] = self._positions
        self._seq[:n] = self._slots
        self._logits[:n] = self._outputs

    def close(self) -> None:
        # `llama_batch_free` frees what `llama_batch_init` put there, not our array.
        pointers = ctypes.cast(self.native.seq_id, ctypes.POINTER(ctypes.c_void_p))
        for row, pointer in enumerate(self._own_pointers):
            pointers[row] = pointer
        self._flat.llama_batch_free(self.native)
