"""Ranks as llama-server, Jina and Cohere answer them, or as text-embeddings-inference does."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request

from worker.api.chat.fields import AdaptedBody, ModelName, TextOr
from worker.api.http.body import Flag, Integer, Many, OpenBody, read
from worker.api.http.faults import refusal
from worker.api.http.operation import Operation
from worker.api.http.state import AppState
from worker.api.pooling.run import rank
from worker.wire.work import Rank

MAX_DOCUMENTS = 2048


class Document(OpenBody):
    text: str


Documents = Annotated[Many[TextOr[Document]], Field(min_length=1, max_length=MAX_DOCUMENTS)]


class RerankBody(AdaptedBody):
    """`POST /v1/rerank`; with `texts`, in the form of text-embeddings-inference."""

    query: str
    documents: Documents | None = None
    texts: Documents | None = None
    model: ModelName | None = None
    top_n: Integer | None = Field(None, ge=1, description="the best so many; all by default")
    return_documents: Flag = False
    return_text: Flag = False


async def rerank(request: Request, state: AppState) -> object:
    body = await read(request, state, RerankBody)
    state.require_model(body.model)
    field, given = ("documents", body.documents) if body.documents else ("texts", body.texts or ())
    texts = [each if isinstance(each, str) else each.text for each in given]
    if not texts:
        raise refusal("documents", "required", "is required: an array of at least 1 text")
    work = Rank(body.query, tuple(texts), field=field)
    scores, n_tokens = await rank(request, state, body.model, body.adapters, work)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    if body.texts is not None:  # the form of text-embeddings-inference
        text = {index: {"text": texts[index]} for index in best} if body.return_text else {}
        return [{"index": i, "score": scores[i], **text.get(i, {})} for i in best]
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]} for index in best
    ]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    whole = {"object": "list", "model": state.name_of(body.model), "results": results}
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return whole | {"usage": usage}


OPERATIONS = [
    Operation("POST", path, rerank, "Documents by how well they answer a query", body=RerankBody)
    for path in ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking")
]
