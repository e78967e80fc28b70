"""OpenAI's embeddings. A thread encodes them."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

import pydantic_core
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.fields import prompts_of, prompts_of_at_most
from worker.api.http.body import Integer, OpenBody, read_as
from worker.api.http.encoding import dumps, sliced
from worker.api.http.faults import fault, invalid
from worker.api.http.operation import Operation
from worker.api.http.state import AppState
from worker.api.pooling.run import Embedding, embed
from worker.wire.work import MarkedPrompt, MixedTokens

MAX_INPUTS = 2048
SHORT_PATH, OWN_PATH = "/embeddings", "/embedding"
"""The second is where llama-server answers in its own form alone."""
Prompts: Any = prompts_of_at_most(MAX_INPUTS)


class EmbeddingBody(OpenBody):
    """`POST /v1/embeddings`; with `content`, the answer has llama-server's own form."""

    input: Prompts | None = None
    content: Prompts | None = None
    model: str | None = Field(None, max_length=1024)
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Integer | None = Field(None, ge=1)
    embd_normalize: Integer = Field(
        2,
        ge=-1,
        le=16,
        description="the p of the p-norm that vectors are scaled by; -1 is none, 0 the largest",
    )
    user: str | None = None

    @model_validator(mode="after")
    def _has_texts(self) -> Self:
        if self.input is None and self.content is None:
            raise PydanticCustomError("body.required", "needs input")
        return self

    def inputs(self) -> tuple[str | MixedTokens, ...]:
        """
        Raises:
            InvalidRequest: there are pictures or sounds, of which no embeddings are made.
        """
        given, path = (self.input, "input") if self.content is None else (self.content, "content")
        found = prompts_of(given, path)
        texts = tuple(each for each in found if not isinstance(each, MarkedPrompt))
        if len(texts) < len(found):
            message = f"{path}: embeddings are made of texts and tokens, without multimodal_data"
            raise invalid([fault(path, "unsupported", message)])
        return texts


async def embeddings(request: Request, state: AppState) -> Response:
    body, inputs = await read_as(request, state, EmbeddingBody, lambda body: (body, body.inputs()))
    state.require_model(body.model)
    path, pooling = request.url.path, state.loaded().model.pooling
    is_own = body.content is not None or path == OWN_PATH
    is_own |= path == SHORT_PATH and pooling == "none"  # OpenAI's form has no place for it
    norm, dimensions = body.embd_normalize, body.dimensions
    found = await embed(request, state, body.model, inputs, dimensions, norm, of_tokens=is_own)
    if is_own:
        return await sliced(_in_their_form(found, body))
    return await sliced(_encoded(found, body, state.name_of(body.model)))


def _in_their_form(found: Sequence[Embedding], body: EmbeddingBody) -> Iterator[bytes]:
    """llama-server's own: a list of vectors for each text, which is one if the model pools."""
    for index, each in enumerate(found):
        vectors = [vector.tolist() for vector in each.vectors(body.dimensions)]
        entry = {"index": index, "embedding": vectors}
        yield (b"," if index else b"[") + pydantic_core.to_json(entry)
    yield b"]"


def _encoded(found: Sequence[Embedding], body: EmbeddingBody, model_name: str) -> Iterator[bytes]:
    """The answer as JSON, each vector by itself so that other threads get their turns."""
    yield b'{"object":"list","data":['
    for index, each in enumerate(found):
        vector = each.values(body.dimensions)
        as_base64 = body.encoding_format == "base64"
        packed = base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()
        entry = {"object": "embedding", "index": index, "embedding": packed}
        # Ten times as fast with numbers as the standard library's encoder.
        yield (b"," if index else b"") + pydantic_core.to_json(entry)
    n_tokens = sum(each.n_tokens for each in found)
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    yield b"]," + dumps({"model": model_name, "usage": usage})[1:].encode()


OPERATIONS = [
    Operation("POST", path, embeddings, "OpenAI's embeddings", body=EmbeddingBody)
    for path in ("/v1/embeddings", SHORT_PATH, OWN_PATH)
]
