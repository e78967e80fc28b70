"""Asks the engine for vectors and ranks of texts, for whichever dialect was asked.

A model pools or generates, and a pooling one makes embeddings or ranks: what it was not made for is
refused by name. Runs on the API process's event loop.
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
    """One text's vector as the engine sends it."""

    n_tokens: int
    data: bytes
    """32-bit floats."""
    n_vectors: int = 1
    """One for each token where nothing is pooled."""
    norm: int = 2
    """What they are scaled by; `work.Embed` says how."""

    @property
    def n_values(self) -> int:
        return len(self.data) // 4

    def vectors(self, n: int | None = None) -> list[array[float]]:
        width = len(self.data) // self.n_vectors
        parts = (self.data[at : at + width] for at in range(0, len(self.data), width))
        return [Embedding(1, part, 1, self.norm).values(n) for part in parts]

    def values(self, n: int | None = None) -> array[float]:
        """The first `n` dimensions, scaled anew: some models are trained for shorter vectors."""
        vector = array("f", self.data)
        if n is None or n == len(vector):
            return vector
        size = _size(vector[:n], self.norm)
        return array("f", [x / size for x in vector[:n]]) if size else vector[:n]


_LARGEST = 32760


def _size(vector: array[float], norm: int) -> float:
    """What a vector is divided by; 0 for one that stays as it is."""
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
    """The vectors of `work`. With `of_tokens`, each token may have a vector, as it comes.

    Raises:
        InvalidRequest: the model makes no embeddings, or none of so many dimensions, or of tokens;
            or an input is too long.
        NotReady: the model is still loading.
    """
    model = state.loaded().model
    if model.pooling is None:
        raise _unfit(
            "this model generates text and makes no embeddings; "
            "a worker started with --pooling mean makes them"
        )
    if model.pooling == "rank":
        raise _unfit("this model ranks documents and makes no embeddings; send to /v1/rerank")
    is_pooled = model.pooling != "none"
    if not is_pooled and not of_tokens:
        raise _unfit("with --pooling none each token has an embedding; send to /embedding")
    if dimensions is not None and dimensions > model.embedding_length:
        what = f"must be at most {model.embedding_length} with this model"
        raise refusal("dimensions", "maximum", what, dimensions)
    norm = work.norm if is_pooled else -1
    found: list[tuple[int, bytes]] = await answered(request, state, replace(work, norm=norm))
    return [Embedding(n, data, 1 if is_pooled else n, norm) for n, data in found]


async def rank(request: Request, state: AppState, work: Rank) -> tuple[list[float], int]:
    """A score for each document, in their order, and the tokens.

    Raises:
        InvalidRequest: the model ranks nothing, or a document is too long.
        NotReady: the model is still loading.
    """
    pooling = state.loaded().model.pooling
    if pooling is None:
        raise _unfit("this model generates text and ranks nothing")
    if pooling != "rank":
        raise _unfit("this model makes embeddings and ranks nothing; send to /v1/embeddings")
    vectors: list[tuple[int, bytes]] = await answered(request, state, work)
    # The first output of a classifier is the score for "this answers the query".
    scores = [array("f", data)[0] for _, data in vectors]
    return scores, sum(n_tokens for n_tokens, _ in vectors)


def _unfit(why: str) -> InvalidRequest:
    """The refusal of a use that the model was not made for: its output would be meaningless."""
    return invalid([fault("model", "unsupported", f"model: {why}")])
