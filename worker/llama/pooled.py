"""Pooled outputs of several texts in one decode. Engine thread."""

from __future__ import annotations

from itertools import accumulate, cycle, islice, pairwise

import numpy as np
import numpy.typing as npt

from worker.errors import InferenceFailed
from worker.llama.batch import Batch
from worker.llama.context import Context
from worker.llama.draw import NotANumber
from worker.wire.adapters import Applied

UNSCALED = -1
"""The norm with which a vector is not scaled."""
LARGEST = 32760.0
"""Norm 0 scales the largest absolute value of a vector to this."""
Vector = npt.NDArray[np.float32]
SHARED_TOKENS = 1024
"""The most tokens of texts that share a decode. Attention reads all of them for each text, so with
more, a second decode would be faster."""


class PooledContext:
    """Computes texts as sequences of one batch; the context is empty afterwards."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._batch = Batch(context.options.n_batch)
        self.token_bytes = 0 if context.pools else 4 * context.model.n_embd
        """The size of a token's output, if nothing is pooled; else 0."""
        self.most_texts = context.options.n_seq_max
        """The most texts in one decode."""
        self.most_tokens = min(SHARED_TOKENS, context.options.n_ubatch)
        """The most tokens of all texts in one decode; a longer text is computed alone."""

    def __call__(self, texts: list[list[int]], adapters: Applied = ()) -> list[Vector]:
        """Unscaled embeddings or ranks: for each text a vector, or (tokens, n_embd) if nothing is
        pooled.

        Raises `InferenceFailed` if the device cannot compute the texts, or computes NaN or
        infinity.
        """
        context, batch = self._context, self._batch
        context.apply(adapters)
        batch.clear()
        for slot, tokens in enumerate(texts):
            batch.add(slot, 0, tokens, logits=True)
        batch.want_all_logits()
        try:
            outcome = context.decode(batch)
            if outcome != "ok":
                raise InferenceFailed(f"the device cannot compute the texts ({outcome})")
            vectors = self._outputs(texts)
            if not all(np.isfinite(vector).all() for vector in vectors):
                context.clear(zero=True)
                raise NotANumber
        finally:
            context.clear()
        return vectors

    def warm_up(self, text: list[int], most_tokens: int) -> None:
        """Compute a text; on a GPU, repeat it to the longest length, `most_tokens`. This takes the
        most memory, so a device that lacks it fails now and not hours later."""
        n_tokens = most_tokens if self._context.options.offload else len(text)
        self([list(islice(cycle(text), n_tokens))])

    def _outputs(self, texts: list[list[int]]) -> list[Vector]:
        context = self._context
        if context.pools:
            return [context.pooled(slot) for slot in range(len(texts))]
        ends = accumulate(map(len, texts), initial=0)
        return [context.of_tokens(range(*rows)) for rows in pairwise(ends)]


def scaled(vector: Vector, norm: int) -> bytes:
    """A vector scaled by its norm as by llama.cpp's `embd_normalize` (see `work.Embed`), in 32-bit
    floats."""
    if norm == UNSCALED:
        return vector.tobytes()
    sizes = abs(vector.astype("f8"))
    length = (sizes**norm).sum() ** (1 / norm) if norm else sizes.max() / LARGEST
    return (vector / (float(length) or 1.0)).tobytes()
