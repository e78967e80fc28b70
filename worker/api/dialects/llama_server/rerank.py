"""Ranks as llama-server, Jina and Cohere answer them, or as text-embeddings-inference does."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.fields import Many, TextOr
from worker.api.http.body import Flag, Integer, OpenBody, read
from worker.api.http.encoding import json_response
from worker.api.http.faults import fault, invalid
from worker.api.http.operation import MODEL_ERRORS, Operation
from worker.api.http.state import AppState
from worker.api.pooling.run import rank

MAX_DOCUMENTS = 2048


class Document(OpenBody):
    text: str


Documents = Annotated[Many[TextOr[Document]], Field(min_length=1, max_length=MAX_DOCUMENTS)]


class RerankBody(OpenBody):
    """`POST /v1/rerank`; with `texts`, in the form of text-embeddings-inference."""

    query: str
    documents: Documents | None = None
    texts: Documents | None = None
    model: str | None = Field(None, max_length=1024)
    top_n: Integer | None = Field(None, ge=1, description="the best so many; all by default")
    return_documents: Flag = False
    return_text: Flag = False

    @property
    def document_texts(self) -> tuple[str, ...]:
        given = self.documents or self.texts or ()
        return tuple(each if isinstance(each, str) else each.text for each in given)


async def rerank(request: Request, state: AppState) -> Response:
    body = await read(request, state, RerankBody)
    state.require_model(body.model)
    texts = body.document_texts
    if not texts:
        message = "documents is required: an array of at least 1 text"
        raise invalid([fault("documents", "required", message)])
    scores, n_tokens = await rank(request, state, body.model, body.query, texts)
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
    whole = {"object": "list", "model": state.name_of(body.model), "results": results}
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return json_response(whole | {"usage": usage})


OPERATIONS = [
    Operation(
        "POST", f"{prefix}/{name}", rerank, "Documents by how well they answer a query",
        body=RerankBody, errors=MODEL_ERRORS,
    )
    for prefix in ("/v1", "")
    for name in ("rerank", "reranking")
]  # fmt: skip
