"""Embeddings and ranks of texts, for all dialects.

A model either generates or pools, and one that pools either embeds or ranks. Any other use is
refused with the reason. Runs on the API process's event loop.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from msgspec.structs import replace
from starlette.requests import Request

from worker.api.chat.run import answered
from worker.api.http.faults import fault, invalid, refusal
from worker.api.http.state import AppState
from worker.errors import InvalidRequest
from worker.wire.work import Embed, Rank


class Embedding(NamedTuple):
    """A text's vector or vectors, as the engine sends them."""

    n_tokens: int
    data: bytes
    """32-bit floats."""
    n_vectors: int = 1
    """1, or the number of tokens if the model does not pool."""
    norm: int = 2
    """The norm that they are scaled by, as in `work.Embed`."""

    @property
    def n_values(self) -> int:
        return len(self.data) // 4

    def vectors(self, n: int | None = None) -> list[array[float]]:
        width = len(self.data) // self.n_vectors
        parts = (self.data[at : at + width] for at in range(0, len(self.data), width))
        return [Embedding(1, part, 1, self.norm).values(n) for part in parts]

    def values(self, n: int | None = None) -> array[float]:
        """The first `n` dimensions, scaled again; some models are trained for shorter vectors."""
        vector = array("f", self.data)
        if n is None or n == len(vector):
            return vector
        size = _size(vector[:n], self.norm)
        return array("f", [x / size for x in vector[:n]]) if size else vector[:n]


_LARGEST = 32760


def _size(vector: array[float], norm: int) -> float:
    """The divisor that scales a vector; 0 if it stays unchanged."""
    if norm < 0:
        return 0.0
    if norm == 0:
        return max(map(abs, vector)) / _LARGEST
    return float(sum(abs(x) ** norm for x in vector) ** (1 / norm))


async def embed(
    request: Request,
    state: AppState,
    work: Embed,
    dimensions: int | None = None,
    *,
    of_tokens: bool = False,
) -> list[Embedding]:
    """The vectors of `work`. `of_tokens` permits unscaled vectors per token, of a model that does
    not pool.

    Raises:
        InvalidRequest: the model has no embeddings, fewer dimensions, or only embeddings of tokens
            without `of_tokens`; or an input is too long.
        NotReady: the model is still loading.
    """
    model = state.loaded().model
    if model.pooling is None:
        raise _unfit(
            "this model generates text and makes no embeddings; "
            "start a worker with --pooling mean for that"
        )
    if model.pooling == "rank":
        raise _unfit("this model ranks documents and makes no embeddings; use /v1/rerank")
    is_pooled = model.pooling != "none"
    if not is_pooled and not of_tokens:
        raise _unfit("with --pooling none each token has its own embedding; use /embedding")
    if dimensions is not None and dimensions > model.embedding_length:
        what = f"must be at most {model.embedding_length} with this model"
        raise refusal("dimensions", "maximum", what, dimensions)
    norm = work.norm if is_pooled else -1
    found: list[tuple[int, bytes]] = await answered(request, state, replace(work, norm=norm))
    return [Embedding(n, data, 1 if is_pooled else n, norm) for n, data in found]


async def rank(request: Request, state: AppState, work: Rank) -> tuple[list[float], int]:
    """Each document's score, in the same order, and the number of tokens.

    Raises:
        InvalidRequest: the model does not rank, or a document is too long.
        NotReady: the model is still loading.
    """
    pooling = state.loaded().model.pooling
    if pooling is None:
        raise _unfit("this model generates text and does not rank")
    if pooling != "rank":
        raise _unfit("this model makes embeddings and does not rank; use /v1/embeddings")
    vectors: list[tuple[int, bytes]] = await answered(request, state, work)
    # A classifier's first output is the score for "this document answers the query".
    scores = [array("f", data)[0] for _, data in vectors]
    return scores, sum(n_tokens for n_tokens, _ in vectors)


def _unfit(why: str) -> InvalidRequest:
    """The error for a use that the model was not made for, whose output would be meaningless."""
    return invalid([fault("model", "unsupported", f"model: {why}")])
