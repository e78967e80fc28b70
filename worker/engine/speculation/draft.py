"""Guesses by a draft model: a small one that reads the stream in its own context. Engine thread.

Each guess is drawn from the small model's logits as the request draws its tokens, with the same
random numbers: where both models agree, both draw the same token.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from worker.engine.sequence import Sequence
from worker.engine.speculation.speculation import Drafter, Guess
from worker.engine.tokens import common_length
from worker.llama.batch import Batch
from worker.llama.context import Context
from worker.llama.draw import NotANumber

_MOST_LEFT = 16
"""The most tokens that are computed together with the next guess, if a batch holds as many."""


class DraftModel(Drafter):
    """It has cells for one sequence. What a stream shares with the previous one stays there.

    Nothing of another tenant (`cache_salt`) does: the time to the first guess would reveal it.
    """

    kinds: Rows[float] = (0.6,)
    computes = True

    def __init__(self, context: Context, n_vocab: int, *, keeps: bool = True) -> None:
        """`n_vocab`: tokens that both models have. `keeps`: cells for the streams that follow."""
        self._context, self._n_vocab, self._keeps = context, n_vocab, keeps
        self._batch = Batch(context.options.n_batch)
        self._most_left = min(_MOST_LEFT, self._batch.capacity)
        self._request_id = -1
        self._salt: str | None = None
        self._tokens: list[int] = []
        """The tokens in the cells."""

    def follow(self, sequence: Sequence) -> bool:
        """Compute the stream's tokens, a batch at a time, up to the last few."""
        self._turn_to(sequence)
        tokens = sequence.tokens
        if len(tokens) + self._most_left > self._context.n_ctx:
            return False
        n_known = min(common_length(self._tokens, tokens), len(tokens) - 1)
        if n_known < len(self._tokens):
            self._cut(n_known)
        n_left = len(tokens) - n_known
        if n_left > self._most_left:
            n_now = min(n_left - 1, self._batch.capacity)
            self._compute(tokens[n_known : n_known + n_now])
        return len(tokens) - len(self._tokens) <= self._most_left

    def guess(self, sequence: Sequence, most: int) -> list[Guess]:
        guesses: list[int] = []
        left = sequence.tokens[len(self._tokens) :]
        while len(guesses) < most and self._compute(left):
            logits = self._context.logits(self._batch.n_rows - 1)[: self._n_vocab]
            try:
                left = [sequence.sampler.guess(logits, len(guesses))]
            except NotANumber:
                self._start_over()
                break
            guesses += left
        return [Guess(token, 0) for token in guesses]

    def use_threads(self, n_threads: int) -> None:
        self._context.use_threads(n_threads)

    def _turn_to(self, sequence: Sequence) -> None:
        if sequence.request_id != self._request_id:
            if not self._keeps or sequence.request.cache_salt != self._salt:
                self._cut(0)
            self._request_id, self._salt = sequence.request_id, sequence.request.cache_salt

    def _fill(self, tokens: list[int]) -> None:
        """Make tokens the batch, with logits after the last."""
        self._batch.clear()
        self._batch.add(0, len(self._tokens), tokens, logits=True)

    def _compute(self, tokens: list[int]) -> bool:
        """Compute tokens, with logits after the last. Returns false if that fails."""
        self._fill(tokens)
        if max(tokens) >= self._context.model.n_vocab or self._context.decode(self._batch) != "ok":
            self._cut(len(self._tokens))
            return False
        self._tokens += tokens
        return True

    def _start_over(self) -> None:
        self._context.clear(zero=True)
        self._tokens.clear()

    def _cut(self, length: int) -> None:
        self._context.truncate(0, length)
        del self._tokens[length:]
