"""Reranking in the form of llama-server, Jina and Cohere, or of text-embeddings-inference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request

from worker.api.chat.field_types import TextOr
from worker.api.chat.fields import AdaptedBody
from worker.api.http.body import Flag, Integer, Many, OpenBody, Refused, name_ignored, read
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
    """Documents to rank. With `texts`, the answer has text-embeddings-inference's form."""

    query: str
    documents: Documents | None = None
    texts: Documents | None = None
    top_n: Integer | None = Field(None, ge=1, description="return only this many; default: all")
    instruction: Annotated[Any, Refused("put it into the query")] = None
    return_documents: Flag = Field(False, description="return the text of each document")
    return_text: Flag = Field(False, description="the same, for texts")

    @property
    def has_texts(self) -> bool:
        """Whether the body, and so the answer, has text-embeddings-inference's form."""
        return self.documents is None

    def unused(self) -> Iterator[str]:
        """Fields that only have an effect in the other form."""
        if not self.has_texts and self.texts is not None:
            yield "texts"
        if self.return_documents and self.has_texts:
            yield "return_documents"
        if self.return_text and not self.has_texts:
            yield "return_text"


async def rerank(request: Request, state: AppState) -> object:
    body = await read(request, state, RerankBody)
    adapters = state.adapters.of(body.model, body.lora)
    name_ignored(request, body.unused())
    field, found = ("texts", body.texts) if body.has_texts else ("documents", body.documents)
    texts = [each if isinstance(each, str) else each.text for each in found or ()]
    if not texts:
        raise refusal("documents", "required", "is required: an array of at least 1 text")
    work = Rank(body.query, tuple(texts), adapters=adapters, field=field)
    scores, n_tokens = await rank(request, state, work)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    if body.has_texts:
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
    Operation("POST", path, rerank, "Rank documents by their relevance to a query", body=RerankBody)
    for path in ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking", "/v2/rerank")
]
