"""Embeddings as OpenAI answers them, and ranks as Jina and Cohere do.

Ranks are also answered in the form of text-embeddings-inference. A thread encodes the embeddings.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator
from typing import Any

import pydantic_core
from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.run import answer
from worker.api.dialects.openai.answers import Embeddings, Ranking
from worker.api.dialects.openai.generation import require_model
from worker.api.dialects.openai.schema import EmbeddingBody, RerankBody, inputs_of
from worker.api.http.body import read
from worker.api.http.encoding import dumps, json_response, sliced
from worker.api.http.faults import fault, invalid
from worker.api.http.operation import JSON, MODEL_ERRORS, Operation
from worker.api.http.state import AppState, state_of
from worker.errors import NotReady
from worker.wire.engine_info import EngineInfo, ModelInfo
from worker.wire.work import Embed, Rank

Vectors = list[tuple[int, bytes]]
"""For each text, its number of tokens and its vector as 32-bit floats."""


async def embeddings(request: Request) -> Response:
    state = state_of(request)
    body = await read(request, state, EmbeddingBody)
    require_model(body.model, state)
    model = info_of(state).model
    _require(model, "embeddings")
    if body.dimensions is not None and body.dimensions > model.embedding_length:
        message = f"dimensions must be at most {model.embedding_length} with this model"
        raise invalid([fault("dimensions", "maximum", message, body.dimensions)])
    vectors: Vectors = await answer(request, Embed(tuple(inputs_of(body.input))))
    return await sliced(_encoded(vectors, body, state.model_name))


def _encoded(vectors: Vectors, body: EmbeddingBody, model_name: str) -> Iterator[bytes]:
    """The answer as JSON, each vector by itself so that other threads get their turns."""
    yield b'{"object":"list","data":['
    for index, (_, data) in enumerate(vectors):
        vector = _shortened(array("f", data), body.dimensions)
        as_base64 = body.encoding_format == "base64"
        packed = base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()
        entry = {"object": "embedding", "index": index, "embedding": packed}
        # Ten times as fast with numbers as the standard library's encoder.
        yield (b"," if index else b"") + pydantic_core.to_json(entry)
    yield b"]," + dumps({"model": model_name, "usage": _usage(vectors)})[1:].encode()


def _shortened(vector: array[float], n: int | None) -> array[float]:
    """The first `n` dimensions, scaled to length 1: some models are trained for shorter vectors."""
    if n is None or n == len(vector):
        return vector
    norm = sum(x * x for x in vector[:n]) ** 0.5
    return array("f", [x / norm for x in vector[:n]]) if norm else vector[:n]


async def rerank(request: Request) -> Response:
    state = state_of(request)
    body = await read(request, state, RerankBody)
    require_model(body.model, state)
    _require(info_of(state).model, "ranks")
    texts = body.document_texts
    if not texts:
        message = "documents is required: an array of at least 1 text"
        raise invalid([fault("documents", "required", message)])
    vectors: Vectors = await answer(request, Rank(body.query, texts))
    # The first output of a classifier is the score for "this answers the query".
    scores = [array("f", data)[0] for _, data in vectors]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    if body.texts is not None:  # the form of text-embeddings-inference
        text = {index: {"text": texts[index]} for index in best} if body.return_text else {}
        return json_response([{"index": i, "score": scores[i], **text.get(i, {})} for i in best])
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]} for index in best
    ]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    whole = {"object": "list", "model": state.model_name, "results": results}
    return json_response(whole | {"usage": _usage(vectors)})


def _require(model: ModelInfo, what: str) -> None:
    """Refuse a use that the model was not made for: its output would be meaningless."""
    if model.pooling is None:
        message = f"model: this model generates text and makes no {what} (it does not pool)"
    elif what == "ranks" and model.pooling != "rank":
        message = "model: this model makes embeddings and ranks nothing; send to /v1/embeddings"
    elif what == "embeddings" and model.pooling == "rank":
        message = "model: this model ranks documents and makes no embeddings; send to /v1/rerank"
    else:
        return
    raise invalid([fault("model", "unsupported", message)])


def _usage(vectors: Vectors) -> dict[str, int]:
    prompt_tokens = sum(n_tokens for n_tokens, _ in vectors)
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}


def info_of(state: AppState) -> EngineInfo:
    """
    Raises:
        NotReady: the model is still loading.
    """
    info = state.supervisor.info
    if info is None:
        progress = state.supervisor.status().progress
        message = f"the model is not loaded yet ({progress.phase}, {progress.percent:.0f} %)"
        raise NotReady(message, phase=progress.phase, percent=progress.percent)
    return info


OPERATIONS = [
    operation
    for prefix in ("/v1", "")
    for operation in (
        Operation(
            "POST", f"{prefix}/embeddings", embeddings, "OpenAI's embeddings", {JSON: Embeddings},
            body=EmbeddingBody, errors=MODEL_ERRORS,
        ),
        Operation(
            "POST", f"{prefix}/rerank", rerank, "Documents by how well they answer a query",
            {JSON: Ranking}, body=RerankBody, errors=MODEL_ERRORS,
        ),
    )
]  # fmt: skip
