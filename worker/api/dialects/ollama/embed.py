"""Ollama's embeddings, in its newer and its older form."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import pydantic_core
from pydantic import Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.fields import ByKind, Text
from worker.api.dialects.ollama.naming import nanoseconds, served, tagged
from worker.api.http.body import Integer, OpenBody, read
from worker.api.http.encoding import dumps, sliced
from worker.api.http.operation import Operation
from worker.api.http.state import AppState
from worker.api.pooling.run import Embedding, embed

MAX_INPUTS = 2048


Inputs = Annotated[
    Text | Annotated[tuple[str, ...], Field(fail_fast=True, max_length=MAX_INPUTS), Tag("~list")],
    ByKind,
]


class NoOptions(OpenBody):
    """Every option is one of generation, or of the load: all are ignored by name."""


class EmbedBody(OpenBody):
    """`POST /api/embed`."""

    model: str = Field(max_length=1024)
    input: Inputs = ()
    dimensions: Integer | None = Field(None, ge=1)
    options: NoOptions = NoOptions()


class EmbeddingsBody(OpenBody):
    """`POST /api/embeddings`."""

    model: str = Field(max_length=1024)
    prompt: str = ""
    options: NoOptions = NoOptions()


async def embeddings(request: Request, state: AppState) -> Response:
    began = time.monotonic()
    body = await read(request, state, EmbedBody)
    state.require_model(model := served(body.model, state))
    inputs = [body.input] if isinstance(body.input, str) else list(body.input)
    found = await embed(request, state, model, inputs, body.dimensions) if body.input else []
    return await sliced(_encoded(found, body.dimensions, tagged(state.name_of(model)), began))


def _encoded(
    found: Sequence[Embedding], dimensions: int | None, model: str, began: float
) -> Iterator[bytes]:
    """The answer as JSON, each vector by itself so that other threads get their turns."""
    yield f'{{"model":{dumps(model)},"embeddings":['.encode()
    for index, each in enumerate(found):
        yield (b"," if index else b"") + pydantic_core.to_json(each.values(dimensions).tolist())
    end = {
        "total_duration": nanoseconds(time.monotonic() - began),
        "load_duration": 0,
        "prompt_eval_count": sum(each.n_tokens for each in found),
    }
    yield b"]," + dumps(end)[1:].encode()


async def embedding(request: Request, state: AppState) -> object:
    body = await read(request, state, EmbeddingsBody)
    state.require_model(model := served(body.model, state))
    found = await embed(request, state, model, [body.prompt]) if body.prompt else []
    return {"embedding": found[0].values().tolist() if found else []}


OPERATIONS = [
    Operation("POST", "/api/embed", embeddings, "Ollama's embeddings", body=EmbedBody),
    Operation(
        "POST",
        "/api/embeddings",
        embedding,
        "One embedding, in the older form",
        body=EmbeddingsBody,
    ),
]
