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
        self.capacity = capacity
        self._positions = np.empty((1, 0), np.int32)
        """The positions of embeddings, kept alive for native code."""
        self.at_once = False
        """Whether attention is not causal: each row sees all others, even later ones."""
        token, pos, seq, n_seq = ((ctypes.c_int32 * capacity)() for _ in range(4))
        logits = (ctypes.c_int8 * capacity)()
        self._token, self._pos, self._seq = (_view(each, "i") for each in (token, pos, seq))
        self._logits = _view(logits, "B")
        _view(n_seq, "i")[:] = array("i", [1]) * capacity
        # `seq_id` has a pointer to each row's list of sequences; here, each list has one element.
        self._lists = np.arange(capacity, dtype=np.uintp) * 4 + ctypes.addressof(seq)
        self._tokens = self.native = library.load().llama_batch(
            token=token,
            pos=pos,
            n_seq_id=n_seq,
            seq_id=self._lists.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=logits,
        )

    def set_embeddings(
        self,
        slot: int,
        positions: npt.NDArray[np.int32],
        rows: npt.NDArray[np.float32],
        *,
        logits: bool,
        at_once: bool,
    ) -> None:
        """Replace the whole batch by rows of embeddings; `logits` requests those of the last row.

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
        """Prepare one row for each entry of `slots`; `logits` has a 1 for each row that requests
        its logits, else a 0. `set_rows` fills the rows."""
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
        """Request an output at every row, which pooled embeddings and comparisons need."""
        self._logits[: self.n_rows] = b"\1" * self.n_rows


def _view(block: Any, code: Literal["i", "B"]) -> memoryview[int]:
    """A native array's elements, of the `array` type `code`."""
    return memoryview(block).cast("B").cast(code)
