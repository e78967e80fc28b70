"""The loop's interface to a model: llama.cpp's context, batch and samplers.

Engine thread, except `abort`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from worker.devices.plan.projector import EMBEDDINGS_BYTES
from worker.engine.media.embeddings import Embeddings
from worker.engine.media.span import Span
from worker.engine.sequence import Sequence as EngineSequence
from worker.engine.step import Chunk
from worker.llama.batch import Batch
from worker.llama.context import Context
from worker.llama.media import Projector
from worker.llama.model import Model
from worker.llama.sampler import Sampler, log_probabilities
from worker.wire.messages import DecodeOutcome, TokenLogprob

Drafts = Mapping[EngineSequence, Sequence[int]]
"""Guessed tokens that follow a sequence's chunk."""
NO_DRAFTS: Drafts = {}


class ModelRunner:
    """A model with its KV cache. The loop's tests use a byte-level model in its place."""

    def __init__(
        self,
        model: Model,
        context: Context,
        context_length: int,
        projector: Projector | None = None,
    ) -> None:
        self._model, self._context, self._projector = model, context, projector
        self._embeddings = Embeddings(EMBEDDINGS_BYTES)
        self._batch = Batch(context.options.n_batch)
        self._rows: list[int] = []
        self._slots: list[int] = []
        self._order: list[int] = []
        """The slots of the last batch of single rows, and the order of its rows."""
        self.is_eog: Callable[[int], bool] = model.eog.__contains__
        self.cells = context
        """The context, which holds the slots' cells."""
        self.context_length = context_length
        self.rows_a_pass = context.options.n_ubatch
        has_still_tokens = projector is not None and projector.has_four_positions
        self.memory_kind = replace(context.memory_kind, has_still_tokens=has_still_tokens)
        self.decode: Callable[[], DecodeOutcome] = partial(context.decode, self._batch)
        """Compute the batch; blocks until the device is done."""
        self.abort = context.abort
        self.use_threads = context.use_threads

    def encode(self, span: Span, salt: str | None) -> bool:
        """Compute the embeddings of a part of a medium for `fill`. Returns false if an earlier
        request with this salt has left them."""
        assert self._projector is not None, "without one, no prompt has media"
        key = (salt, span.key)
        is_new = self._embeddings.get(key) is None
        if is_new:
            self._embeddings.put(key, self._projector.encode(span.chunk))
        return is_new

    def fill(self, chunks: Sequence[Chunk], drafts: Drafts = NO_DRAFTS) -> None:
        """Make the chunks, each followed by its draft, the batch that `decode` computes, and apply
        their adapters, which are the same. A chunk of a medium, whose part was just encoded, is the
        only one."""
        batch = self._batch
        sequence, start, n_tokens = chunks[0]
        self._context.apply(sequence.request.adapters)
        if sequence.spans and (span := sequence.next_span) is not None:
            embeddings = self._embeddings.get((sequence.request.cache_salt, span.key))
            assert embeddings is not None, "what was encoded last is kept"
            assert self._projector is not None, "without one, no prompt has media"
            first = start - span.start
            places = self._projector.positions(span.chunk, sequence.position(span.start))
            batch.set_embeddings(
                sequence.slot or 0,
                places[:, first : first + n_tokens],
                embeddings[first : first + n_tokens],
                logits=start + n_tokens == len(sequence.tokens),
                at_once=span.chunk.at_once,
            )
            self._slots, self._rows = [], [n_tokens - 1]
            return
        slots = [chunk.sequence.slot or 0 for chunk in chunks]
        if not drafts and sum([n for _, _, n in chunks]) == len(chunks):
            # Single rows are the usual case, mostly with the slots of the step before.
            if slots != self._slots:
                self._slots, self._order = slots, sorted(range(len(slots)), key=slots.__getitem__)
                self._rows = [0] * len(slots)
                for row, index in enumerate(self._order):
                    self._rows[index] = row
                batch.set_slots([slots[index] for index in self._order], b"\1" * len(slots))
            rows = [chunks[index] for index in self._order]
            starts = [s.position(start) if s.spans else start for s, start, _ in rows]
            batch.set_rows(starts, [sequence.tokens[start] for sequence, start, _ in rows])
            return
        self._slots, self._rows = [], [0] * len(chunks)
        tokens: list[int] = []
        positions: list[int] = []
        row_slots: list[int] = []
        logits = bytearray()
        # With a split cache, llama.cpp computes rows in one pass as long as their slots are
        # neighbours: each break costs a pass over all weights.
        for index in sorted(range(len(chunks)), key=slots.__getitem__):
            sequence, start, n_tokens = chunks[index]
            end = start + n_tokens
            position = sequence.position(start) if sequence.spans else start
            draft = drafts.get(sequence)
            if n_tokens == 1:  # most are, and slices take several times as long
                tokens.append(sequence.tokens[start])
                positions.append(position)
                row_slots.append(slots[index])
            else:
                tokens += sequence.tokens[start:end]
                positions += range(position, position + n_tokens)
                row_slots += [slots[index]] * n_tokens
            is_scored = start < sequence.n_prompt and sequence.scores_prompt
            logits += bytes([is_scored]) * (n_tokens - 1)
            logits.append(is_scored or end == len(sequence.tokens))
            self._rows[index] = len(tokens) - 1
            if draft is not None:
                n = len(draft)
                tokens += draft
                positions += range(position + n_tokens, position + n_tokens + n)
                row_slots += [slots[index]] * n
                logits += b"\1" * n
        batch.set_slots(row_slots, logits)
        batch.set_rows(positions, tokens)

    def sample(self, sampler: Sampler, chunk: int, guesses: int = 0) -> int:
        """Draw the token that follows chunk number `chunk` and `guesses` tokens of its draft."""
        return sampler.sample(self._context, self._rows[chunk] + guesses)

    def logprobs(self, chunk: int, token: int, n_top: int, before: int = 0) -> TokenLogprob:
        """The log-probabilities of `token` and of the `n_top` best, at the chunk's end or `before`
        rows earlier."""
        logits = self._context.logits(self._rows[chunk] - before)
        return self.scored(token, *log_probabilities(logits, token, n_top))

    def scored(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> TokenLogprob:
        """A token and its alternatives with their bytes."""

        def scored(token: int, logprob: float, *top: TokenLogprob) -> TokenLogprob:
            return TokenLogprob(token, self._model.piece(token, special=True), logprob, top)

        return scored(token, logprob, *(scored(*each) for each in top))

    def piece(self, token: int, shown: tuple[str, ...] = ()) -> bytes:
        """The bytes of a token; empty for a control token that is not in `shown`."""
        piece = self._model.piece(token)
        if not piece and shown and (text := self._model.token_text(token)) in shown:
            return text.encode()
        return piece
