"""OpenAI's paths. Endpoints run on the API process's event loop."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from worker.api.body import deadline_of, read
from worker.api.encoding import dumps, json_response, quoted
from worker.api.event_stream import EventStream, closing_on_disconnect
from worker.api.faults import fault, invalid
from worker.api.jobs import answer, start_jobs, with_head
from worker.api.openai.answers import (
    ChatCompletion,
    Embeddings,
    ModelEntry,
    Models,
    TextCompletion,
)
from worker.api.openai.generation import (
    Generation,
    ModelNotFound,
    chat_generation,
    completion_generation,
    require_model,
)
from worker.api.openai.schema import ChatBody, CompletionBody, EmbeddingBody, inputs_of
from worker.api.openai.stream import Answer, ChatForm, CompletionForm, Form
from worker.api.operation import JOB_ERRORS, JSON, SSE, Events, Operation
from worker.api.output import merged
from worker.api.state import AppState, state_of
from worker.errors import NotReady
from worker.installation import own_version
from worker.wire.engine_info import EngineInfo
from worker.wire.work import Embed


async def chat_completions(request: Request) -> Response:
    state, deadline = state_of(request), deadline_of(request)
    body = await read(request, state, ChatBody)
    return await _answer(request, chat_generation(body, state, deadline), ChatForm())


async def completions(request: Request) -> Response:
    state, deadline = state_of(request), deadline_of(request)
    body = await read(request, state, CompletionBody)
    return await _answer(request, completion_generation(body, state, deadline), CompletionForm())


async def _answer(request: Request, generation: Generation, form: Form) -> Response:
    state = state_of(request)
    request.scope["state"].setdefault("ignored_fields", []).extend(generation.not_enforced)
    jobs = await start_jobs(state, generation.requests)
    build = f"llorch-worker-{own_version()}"
    choices = Answer(generation, form, generation.outputs(jobs), state.model_name, build)
    if not generation.stream:
        async with closing_on_disconnect(request, *jobs):
            return json_response(await choices.whole(merged(jobs)))
    frames = await with_head(request, jobs, merged(jobs), lambda frame: frame[1])

    def close() -> None:
        for job in jobs:
            job.cancel()

    return EventStream(choices.chunks(frames), state, close)


# --- embeddings --------------------------------------------------------------------------


async def embeddings(request: Request) -> Response:
    state = state_of(request)
    body = await read(request, state, EmbeddingBody)
    require_model(body.model, state)
    model = _info(state).model
    if model.pooling is None:
        message = "model: this model generates text and makes no embeddings (it does not pool)"
        raise invalid([fault("model", "unsupported", message)])
    if body.dimensions is not None and body.dimensions > model.embedding_length:
        message = f"dimensions must be at most {model.embedding_length} with this model"
        raise invalid([fault("dimensions", "maximum", message, body.dimensions)])
    vectors: list[tuple[int, list[float]]] = await answer(
        request, Embed(tuple(inputs_of(body.input)))
    )
    content = await asyncio.to_thread(_embeddings, vectors, body, state.model_name)
    return Response(content, media_type="application/json")


def _embeddings(
    vectors: list[tuple[int, list[float]]], body: EmbeddingBody, model_name: str
) -> bytes:
    """The answer's body, made vector by vector: the encoder holds the interpreter for a whole call,
    so millions of numbers in one would stop the event loop from a thread too."""
    as_base64 = body.encoding_format == "base64"
    data = []
    for index, (_, vector) in enumerate(vectors):
        cut = _shortened(vector, body.dimensions)
        embedding = _packed(cut) if as_base64 else cut
        data.append(dumps({"object": "embedding", "index": index, "embedding": embedding}))
    prompt_tokens = sum(n_tokens for n_tokens, _ in vectors)
    usage = dumps({"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens})
    listed = f'"object":"list","data":[{",".join(data)}]'
    return f'{{{listed},"model":{quoted(model_name)},"usage":{usage}}}'.encode()


def _shortened(vector: list[float], n: int | None) -> list[float]:
    """The first `n` dimensions, of length 1 again, as models trained for that are used."""
    if n is None or n == len(vector):
        return vector
    norm = sum(x * x for x in vector[:n]) ** 0.5
    return [x / norm for x in vector[:n]] if norm else vector[:n]


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


# --- models ------------------------------------------------------------------------------


async def models(request: Request) -> Response:
    state = state_of(request)
    return json_response({"object": "list", "data": [_model(state)]})


async def model(request: Request) -> Response:
    state = state_of(request)
    entry = _model(state)
    name = request.path_params["model"]
    if name != state.model_name and name not in state.settings.served_model_name:
        raise ModelNotFound(f"this worker serves {state.model_name!r} and no other model")
    return json_response(entry)


def _model(state: AppState) -> dict[str, Any]:
    info = _info(state)
    return {
        "id": state.model_name,
        "object": "model",
        "created": int(time.time() - (time.monotonic() - state.started_at)),
        "owned_by": "llorch-worker",
        "root": state.model_name,
        "parent": None,
        "meta": {
            "n_vocab": info.model.vocab_size,
            "n_ctx": info.model.context_length,
            "n_ctx_train": info.model.trained_context_length,
            "n_embd": info.model.embedding_length,
            "n_params": info.model.n_params,
            "size": info.model.size_bytes,
        },
    }


def _info(state: AppState) -> EngineInfo:
    """A model that is still loading is not listed as if it could serve."""
    info = state.supervisor.info
    if info is None:
        progress = state.supervisor.progress
        message = f"the model is not loaded yet ({progress.phase}, {progress.percent:.0f} %)"
        raise NotReady(message, phase=progress.phase, percent=progress.percent)
    return info


ROUTES = [
    operation
    for prefix in ("/v1", "")
    for operation in (
        Operation(
            "POST", f"{prefix}/chat/completions", chat_completions, "OpenAI's chat completions",
            {JSON: ChatCompletion, SSE: Events},
            body=ChatBody, errors=(*JOB_ERRORS, 404), deadline=True,
        ),
        Operation(
            "POST", f"{prefix}/completions", completions, "OpenAI's completions",
            {JSON: TextCompletion, SSE: Events},
            body=CompletionBody, errors=(*JOB_ERRORS, 404), deadline=True,
        ),
        Operation(
            "POST", f"{prefix}/embeddings", embeddings, "OpenAI's embeddings", {JSON: Embeddings},
            body=EmbeddingBody, errors=(*JOB_ERRORS, 404), deadline=True,
        ),
        Operation(
            "GET", f"{prefix}/models", models, "The model served", {JSON: Models}, errors=(503,)
        ),
        Operation(
            "GET", f"{prefix}/models/{{model:path}}", model, "The model served",
            {JSON: ModelEntry}, errors=(404, 503),
        ),
    )
]  # fmt: skip
