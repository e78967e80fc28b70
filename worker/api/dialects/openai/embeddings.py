"""OpenAI's embeddings. A thread encodes them."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Literal

import pydantic_core
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.fields import inputs_of, prompts_of_at_most
from worker.api.http.body import Integer, OpenBody, read
from worker.api.http.encoding import dumps, sliced
from worker.api.http.operation import MODEL_ERRORS, Operation
from worker.api.http.state import AppState
from worker.api.pooling.run import Embedding, embed

MAX_INPUTS = 2048


class EmbeddingBody(OpenBody):
    """`POST /v1/embeddings`."""

    input: prompts_of_at_most(MAX_INPUTS)  # type: ignore[valid-type]
    model: str | None = Field(None, max_length=1024)
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Integer | None = Field(None, ge=1)
    user: str | None = None


async def embeddings(request: Request, state: AppState) -> Response:
    body = await read(request, state, EmbeddingBody)
    state.require_model(body.model)
    found = await embed(request, state, inputs_of(body.input), body.dimensions)
    return await sliced(_encoded(found, body, state.model_name))


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
    Operation(
        "POST", f"{prefix}/embeddings", embeddings, "OpenAI's embeddings",
        body=EmbeddingBody, errors=MODEL_ERRORS,
    )
    for prefix in ("/v1", "")
]  # fmt: skip
