"""The model and its context as the engine's loop wants them. Used by the engine thread alone
(except `abort`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from worker.llama.batch import Batch
from worker.llama.context import Context
from worker.llama.model import Model
from worker.llama.sampler import Sampler, log_probabilities
from worker.messages import DecodeOutcome, TokenLogprob


class HasTokens(Protocol):
    tokens: list[int]
    slot: int | None


class Chunk(Protocol):
    """Consecutive tokens of one sequence (the scheduler's `Chunk`)."""

    @property
    def sequence(self) -> HasTokens: ...
    @property
    def start(self) -> int: ...
    @property
    def n_tokens(self) -> int: ...


class LlamaBackend:
    def __init__(self, model: Model, context: Context, context_length: int) -> None:
        self._model, self._context = model, context
        self._batch = Batch(context.options.n_batch)
        self._rows: list[int] = []
        # One native call a token is cheap, but not as cheap as looking it up.
        self._eog = model.eog
        self._pieces = [model.piece(token) for token in range(model.n_vocab)]
        self.context_length = context_length
        self.abort = context.abort
        self.resume = context.resume
        self.truncate = context.truncate
        self.copy = context.copy

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Make the chunks' tokens the batch that `decode` computes."""
        batch = self._batch
        batch.clear()
        self._rows = [0] * len(chunks)
        for index in _row_order(chunks):
            chunk = chunks[index]
            sequence, start, n_tokens = chunk.sequence, chunk.start, chunk.n_tokens
            slot, tokens = sequence.slot, sequence.tokens
            assert slot is not None
            end = start + n_tokens
            logits = end == len(tokens)
            if n_tokens == 1:  # a decode row: by far the most, and without a list of one
                self._rows[index] = batch.add_row(slot, start, tokens[start], logits=logits)
            else:
                self._rows[index] = batch.add(slot, start, tokens[start:end], logits=logits)

    def decode(self) -> DecodeOutcome:
        """Compute the batch; blocks until the device is done."""
        outcome = self._context.decode(self._batch)
        if outcome == "ok":
            self._context.synchronize()
        return outcome

    def sample(self, sampler: Sampler, chunk: int) -> int:
        return sampler.sample(self._context, self._rows[chunk])

    def logprobs(self, chunk: int, token: int, n_top: int) -> TokenLogprob:
        logits = self._context.logits(self._rows[chunk])
        logprob, top = log_probabilities(logits, token, n_top)
        piece = self._pieces_with_special
        return TokenLogprob(token, piece[token], logprob, tuple((t, piece[t], p) for t, p in top))

    def is_eog(self, token: int) -> bool:
        return token in self._eog

    def piece(self, token: int) -> bytes:
        return self._pieces[token]

    def close(self) -> None:
        self._batch.close()

    @cached_property
    def _pieces_with_special(self) -> list[bytes]:
        return [self._model.piece(token, special=True) for token in range(self._model.n_vocab)]


def _row_order(chunks: Sequence[Chunk]) -> list[int]:
    """The order of the chunks in their batch, as indices.

    With a split cache llama.cpp puts rows into one micro-batch while each one's slot follows the
    one before, and cuts it where the shorter of them end. So rows go by slot: every break costs a
    pass over all weights. And prompts are kept apart from single rows: a neighbour of one row
    would cut a prompt chunk into one row and an odd rest, below the tile that attention computes.
    """

    slots = [chunk.sequence.slot or 0 for chunk in chunks]
    by_slot = sorted(range(len(chunks)), key=slots.__getitem__)
    prompts = [i for i in by_slot if chunks[i].n_tokens > 1]
    if not prompts:
        return by_slot
    single = [i for i in by_slot if chunks[i].n_tokens == 1]
    if single and slots[prompts[-1]] + 1 == slots[single[0]]:
        return single + prompts
    return prompts + single
