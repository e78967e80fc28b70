"""The input of one `llama_decode`, written directly into its native arrays.

Belongs to the engine thread. A batch is allocated once, at its largest size. Rows are written
through memoryviews, because setting single elements of ctypes pointers or NumPy arrays is slow.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from worker.llama import library


class Batch:
    """Up to `capacity` rows, each one token or embedding of one sequence."""

    def __init__(self, capacity: int) -> None:
        self._flat = library.load()
        self._tokens = self.native = self._flat.llama_batch_init(capacity, 0, 1)
        self.capacity = capacity
        self._positions = np.empty((1, 0), np.int32)
        """Of embeddings."""
        self.at_once = False
        """Whether all rows see each other, also those before the ones after them."""
        self._token = _view(self.native.token, capacity, "i")
        self._pos = _view(self.native.pos, capacity, "i")
        self._logits = _view(self.native.logits, capacity, "B")
        # `seq_id` is an array of pointers to each row's list of sequences. All of them are set
        # once, to the elements of one array.
        self._seq = array("i", [0]) * capacity
        address, _ = self._seq.buffer_info()
        self._pointers = ctypes.cast(self.native.seq_id, ctypes.POINTER(ctypes.c_void_p))
        self._own_pointers = self._pointers[:capacity]
        for row in range(capacity):
            self._pointers[row] = address + row * self._seq.itemsize
        _view(self.native.n_seq_id, capacity, "i")[:] = array("i", [1]) * capacity

    def set_embeddings(
        self,
        slot: int,
        positions: npt.NDArray[np.int32],
        rows: npt.NDArray[np.float32],
        *,
        logits: bool,
        at_once: bool,
    ) -> None:
        """Make rows of embeddings all of the batch.

        `rows` has the shape (n, width of the model's input) and must live until it is computed;
        `positions` has the shape (1, n), or (4, n) for a model with M-RoPE.
        """
        n = len(rows)
        assert n <= self.capacity
        self._positions = np.ascontiguousarray(positions, np.int32)
        self._seq[:n] = array("i", [slot]) * n
        self._logits[:n] = bytes(n - 1) + bytes([logits])
        positions_at = self._positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self._point_to(rows, token=None, pos=positions_at)
        self.at_once = at_once

    def set_states(self, rows: npt.NDArray[np.float32]) -> None:
        """Give each token a hidden state: (all rows, n_embd), which must live until it is
        computed."""
        self._point_to(rows, token=self._tokens.token, pos=self._tokens.pos)

    def _point_to(self, rows: npt.NDArray[np.float32], **own: Any) -> None:
        assert rows.flags.c_contiguous
        tokens = self._tokens
        self.native = type(tokens)(
            n_tokens=len(rows),
            embd=rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            n_seq_id=tokens.n_seq_id,
            seq_id=tokens.seq_id,
            logits=tokens.logits,
            **own,
        )

    @property
    def n_rows(self) -> int:
        return int(self.native.n_tokens)

    def clear(self) -> None:
        self.set_rows([], [])

    def set_slots(self, slots: list[int], logits: bytes | bytearray) -> None:
        """Prepare one row for each slot; `logits` has a 1 for each row that requests its logits,
        else a 0. `set_rows` fills them."""
        n = len(slots)
        assert n <= self.capacity, "the scheduler never plans more than it holds"
        self._seq[:n] = array("i", slots)
        self._logits[:n] = logits

    def set_rows(self, positions: list[int], tokens: list[int]) -> None:
        """Fill the rows that `set_slots` made."""
        n = len(tokens)
        self._token[:n] = array("i", tokens)
        self._pos[:n] = array("i", positions)
        self.native, self.at_once = self._tokens, False
        self.native.n_tokens = n

    def add(self, slot: int, position: int, tokens: Sequence[int], *, logits: bool) -> int:
        """Append tokens at consecutive positions; returns the index of the last row.

        `logits` requests the logits of the last token.
        """
        n, first = len(tokens), self.n_rows
        end = first + n
        assert end <= self.capacity, "nothing adds more than it holds"
        self._token[first:end] = array("i", tokens)
        self._pos[first:end] = array("i", range(position, position + n))
        self._seq[first:end] = array("i", [slot]) * n
        self._logits[first:end] = bytes(n - 1) + bytes([logits])
        self.native.n_tokens = end
        return end - 1

    def want_all_logits(self) -> None:
        """Request an output at every row, as pooled embeddings and comparisons need it."""
        self._logits[: self.n_rows] = b"\1" * self.n_rows

    def close(self) -> None:
        # `llama_batch_free` must free what `llama_batch_init` allocated, not this object's array.
        for row, pointer in enumerate(self._own_pointers):
            self._pointers[row] = pointer
        self._flat.llama_batch_free(self._tokens)


def _view(pointer: Any, n: int, code: Literal["i", "B"]) -> memoryview[int]:
    """A native array of `n` elements of the `array` type `code`."""
    block = ctypes.c_char * (n * array(code).itemsize)
    data = ctypes.cast(pointer, ctypes.POINTER(block)).contents
    return memoryview(data).cast("B").cast(code)
