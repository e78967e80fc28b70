"""Pooled outputs of several texts in one decode. Engine thread."""

from __future__ import annotations

import math

from worker.errors import InferenceFailed
from worker.llama.batch import Batch
from worker.llama.context import Context
from worker.llama.draw import not_a_number

SHARED_TOKENS = 1024
"""The most tokens of texts that share a decode. Attention reads all of them for each text, so with
more, a second decode would be faster."""


class PooledContext:
    """Computes texts as sequences of one batch; the context is empty afterwards."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._batch = Batch(context.options.n_batch)
        self.most_texts = context.options.n_seq_max
        """The most texts in one decode."""
        self.most_tokens = min(SHARED_TOKENS, context.options.n_ubatch)
        """The most tokens of all texts in one decode; a longer text is computed alone."""

    def __call__(self, texts: list[list[int]]) -> list[bytes]:
        """Embeddings scaled to length one, or ranks as they are, as 32-bit floats.

        Raises `InferenceFailed` if the device cannot compute the texts, or computes NaN.
        """
        context, batch = self._context, self._batch
        batch.clear()
        for slot, tokens in enumerate(texts):
            batch.add(slot, 0, tokens, logits=True)
        batch.want_all_logits()
        try:
            outcome = context.decode(batch)
            if outcome != "ok":
                raise InferenceFailed(f"the device cannot compute the texts ({outcome})")
            vectors = [context.pooled(slot) for slot in range(len(texts))]
            if any(math.isnan(vector.sum()) for vector in vectors):
                raise not_a_number()
        finally:
            context.clear()
        if context.ranks:
            return [vector.tobytes() for vector in vectors]
        lengths = [float((vector @ vector) ** 0.5) or 1.0 for vector in vectors]
        return [(v / n).tobytes() for v, n in zip(vectors, lengths, strict=True)]
