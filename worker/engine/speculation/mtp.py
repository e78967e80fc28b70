"""Guesses by the model's own layers for multi-token prediction (MTP). Engine thread.

Such a layer predicts the token after a given one from that token and the model's hidden state
before it. While a stream runs alone, the model's states are copied, and the layer computes them
some tokens at a time. Beyond what the model has computed, the layer's own hidden states are used.
"""

from __future__ import annotations

import numpy as np

from worker.devices.plan.cells import STATES_AHEAD
from worker.engine.sequence import Sequence
from worker.engine.speculation.draft import DraftModel
from worker.engine.speculation.speculation import Guess
from worker.engine.tokens import common_length
from worker.llama.context import Context
from worker.wire.adapters import Applied


class Head(DraftModel):
    """Each of its cells has a token and the state before it. The first tokens have no cells if the
    states before them were not read."""

    def __init__(self, context: Context, trunk: Context, *, keeps: bool = True) -> None:
        """`context` has the layers for multi-token prediction; `trunk` computes the streams."""
        super().__init__(context, context.model.n_vocab, keeps=keeps)
        self._trunk = trunk
        n_rows = self._batch.capacity + STATES_AHEAD
        self._states = np.empty((n_rows, context.model.n_embd), np.float32)
        self._first, self._n_states = 0, 0
        """The index of the token that the first state follows, and the number of states: -1 if the
        state before the next token is not known."""
        self._adapters: Applied = ()

    def read(self, sequence: Sequence, start: int, n_rows: int) -> None:
        tokens = sequence.tokens
        if len(tokens) + self._most_left > self._context.n_ctx:
            return
        self._turn_to(sequence)
        if self._first <= start <= self._first + self._n_states:
            self._n_states = start - self._first
        else:
            self._begin(tokens, start)
        row = 0
        while row < n_rows and self._n_states >= 0:
            rows = range(row, min(row + self._batch.capacity, n_rows))
            row, end = rows.stop, self._n_states + len(rows)
            self._states[self._n_states : end] = self._trunk.hidden_states(rows)
            self._n_states = end
            if end > self._most_left:
                self._compute_known(tokens, len(tokens) - 1)

    def follow(self, sequence: Sequence) -> bool:
        is_read = sequence.request_id == self._request_id
        is_read = is_read and self._first + self._n_states >= len(sequence.tokens) - 1
        if is_read:
            self._compute_known(sequence.tokens, len(sequence.tokens) - 1)
        return is_read and len(self._tokens) == len(sequence.tokens) - 1

    def guess(self, sequence: Sequence, most: int) -> list[Guess]:
        guesses = super().guess(sequence, most)
        self._cut(len(sequence.tokens))
        return guesses

    def forget(self, sequence: Sequence) -> None:
        if sequence.request_id == self._request_id:
            self._compute_known(sequence.tokens, len(sequence.tokens))

    def _turn_to(self, sequence: Sequence) -> None:
        if sequence.request_id == self._request_id:
            return
        if sequence.request.adapters != self._adapters:
            self._cut(0)
        self._adapters = sequence.request.adapters
        super()._turn_to(sequence)
        self._cut(common_length(self._tokens, sequence.tokens))
        self._n_states = -1

    def _begin(self, tokens: list[int], start: int) -> None:
        """Begin the states with that of the token before `start`, which is unknown and set to 0."""
        if len(self._tokens) < start:
            self._cut(0)
            self._tokens[:] = tokens[:start]
        self._first, self._n_states = start - 1, 1
        self._states[0] = 0.0

    def _compute_known(self, tokens: list[int], end: int) -> None:
        """Compute the tokens before `end` whose states are known, and drop the states before the
        last of them."""
        end = min(end, self._first + self._n_states + 1)
        while (n_known := len(self._tokens)) < end:
            if not self._compute(tokens[n_known : min(end, n_known + self._batch.capacity)]):
                self._n_states = -1
                return
        n_over = min(n_known - 1 - self._first, self._n_states)
        if n_over > 0:
            self._n_states -= n_over
            self._states[: self._n_states] = self._states[n_over : n_over + self._n_states]
            self._first += n_over

    def _fill(self, tokens: list[int]) -> None:
        super()._fill(tokens)
        at = len(self._tokens) - 1 - self._first
        self._batch.set_states(self._states[at : at + len(tokens)])

    def _compute(self, tokens: list[int]) -> bool:
        at_end = len(self._tokens) - 1 - self._first + len(tokens)
        if not super()._compute(tokens):
            return False
        if at_end >= self._n_states:
            row = self._batch.n_rows - 1
            self._states[at_end] = self._context.hidden_states(range(row, row + 1))
        return True

    def _start_over(self) -> None:
        super()._start_over()
        self._n_states = -1

    def _cut(self, length: int) -> None:
        if not self._context.truncate(0, length):  # its windows do not reach back there
            self._context.truncate(0, 0)
        del self._tokens[length:]
