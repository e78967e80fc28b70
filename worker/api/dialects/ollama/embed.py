"""Ollama's embeddings, in its newer and its older form."""

from __future__ import annotations

import time
from array import array
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.field_types import ModelName, TextOrList
from worker.api.chat.fields import AdaptedBody
from worker.api.chat.run import answered, held_seconds, load_model
from worker.api.dialects.ollama.naming import nanoseconds, served, tagged
from worker.api.http.body import Flag, Integer, Many, OpenBody, read
from worker.api.http.encoding import in_parts, json_answer
from worker.api.http.operation import Operation
from worker.api.http.state import AppState
from worker.api.pooling.run import Embedding, embed
from worker.wire.work import Embed, MixedTokens, Tokenize, Tokenized

MAX_INPUTS = 2048
_MOST_ADDED = 8
"""An upper bound of the tokens that a vocabulary adds around a text."""
_MOST_OF_A_CHARACTER = 64
"""An upper bound of one non-ASCII character's tokens; normalisation expands some characters."""
Inputs = TextOrList[Annotated[Many[str], Field(max_length=MAX_INPUTS)]]


class NoOptions(OpenBody):
    """All options are ignored, because they are about generation or loading."""


class EmbedBody(AdaptedBody):
    """Texts to embed."""

    model: ModelName
    input: Inputs = ()
    dimensions: Integer | None = Field(None, ge=1, description="keep only the first dimensions")
    truncate: Flag = Field(
        False, description="cut inputs that are too long, instead of refusing them"
    )
    options: NoOptions = NoOptions()


class EmbeddingsBody(AdaptedBody):
    """A text to embed."""

    model: ModelName
    prompt: str = ""
    options: NoOptions = NoOptions()


async def embeddings(request: Request, state: AppState) -> Response:
    began = time.monotonic()
    body = await read(request, state, EmbedBody)
    adapters = state.adapters.of(model := served(body.model, state), body.lora)
    texts = [body.input] if isinstance(body.input, str) else list(body.input)
    inputs: list[str | MixedTokens] = [*texts]
    if body.truncate:
        inputs = [await _cut(request, state, text) for text in texts]
    found: list[Embedding] = []
    if body.input:
        work = Embed(tuple(inputs), adapters=adapters)
        found = await embed(request, state, work, body.dimensions)
    else:
        await load_model(request, state)
    whole = {
        "model": tagged(state.name_of(model)),
        "embeddings": (each.values(body.dimensions) for each in found),
        "total_duration": nanoseconds(time.monotonic() - began),
        "load_duration": nanoseconds(held_seconds(request)),
        "prompt_eval_count": sum(each.n_tokens for each in found),
    }
    return await json_answer(in_parts(whole), sum(each.n_values for each in found))


async def _cut(request: Request, state: AppState, text: str) -> str | MixedTokens:
    """The text unchanged if it fits into the context, else as many of its first tokens as fit."""
    most = state.loaded().model.context_length
    n_most = len(text) if text.isascii() else len(text) * _MOST_OF_A_CHARACTER
    if n_most + _MOST_ADDED <= most:
        return text
    works = [Tokenize(text, add_special=adds) for adds in (True, False)]
    found: list[Tokenized] = [await answered(request, state, work) for work in works]
    tokens, plain = (array("i", each.ids) for each in found)
    if len(tokens) <= most:
        return text
    # Keep the tokens that the vocabulary adds at the end, because some models pool there.
    places = range(len(tokens) - len(plain) + 1)
    n_before = next((n for n in places if tokens[n : n + len(plain)] == plain), len(tokens))
    end = tokens[n_before + len(plain) :]
    return (*tokens[: most - len(end)], *end)


async def embedding(request: Request, state: AppState) -> object:
    body = await read(request, state, EmbeddingsBody)
    adapters = state.adapters.of(served(body.model, state), body.lora)
    found: list[Embedding] = []
    if body.prompt:
        work = Embed((body.prompt,), adapters=adapters, field="prompt")
        found = await embed(request, state, work)
    else:
        await load_model(request, state)
    return {"embedding": found[0].values().tolist() if found else []}


OPERATIONS = [
    Operation("POST", "/api/embed", embeddings, "Embed texts, in Ollama's form", body=EmbedBody),
    Operation(
        "POST",
        "/api/embeddings",
        embedding,
        "Embed a text, in Ollama's older form",
        body=EmbeddingsBody,
    ),
]
