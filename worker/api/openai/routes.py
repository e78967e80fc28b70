"""OpenAI's paths. Endpoints run on the API process's event loop."""

from __future__ import annotations

import base64
import struct
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from worker.api.fields import fault
from worker.api.jobs import Job, start_job
from worker.api.openai.answers import Answer, Chat, Completion, Kind
from worker.api.openai.requests import (
    Ask,
    ModelNotFound,
    inputs_of,
    read_chat,
    read_completion,
    require_model,
)
from worker.api.openai.schemas import embedding_schema
from worker.api.requests import checked, invalid, read_json
from worker.api.responses import EventStream, closing_on_disconnect, json_response
from worker.api.state import AppState, state_of, worker_version
from worker.errors import NotReady
from worker.messages import Embed, EngineInfo


async def chat_completions(request: Request) -> Response:
    return await _answer(request, await read_chat(request, state_of(request)), Chat())


async def completions(request: Request) -> Response:
    return await _answer(request, await read_completion(request, state_of(request)), Completion())


async def _answer(request: Request, ask: Ask, kind: Kind) -> Response:
    state = state_of(request)
    jobs = await _start(state, ask)
    answer = Answer(ask, kind, jobs, state.model_ref, f"llorch-worker-{worker_version()}")
    if ask.stream:

        def close() -> None:
            for job in jobs:
                job.close()

        return EventStream(answer.chunks(), state, close)
    async with closing_on_disconnect(request, *jobs):
        return json_response(await answer.whole())


async def _start(state: AppState, ask: Ask) -> list[Job]:
    """All of the request's jobs or none: a refused one takes back those before it."""
    jobs: list[Job] = []
    try:
        for inference in ask.jobs:
            jobs.append(await start_job(state, inference))
    except BaseException:
        for job in jobs:
            job.close()
        raise
    return jobs


async def embeddings(request: Request) -> Response:
    state = state_of(request)
    body = checked(
        await read_json(request, state), embedding_schema(state.settings.max_prompt_chars)
    )
    require_model(body, state)
    if _info(state).model.pooling is None:
        message = "model: this model generates text and makes no embeddings (it does not pool)"
        raise invalid([fault("model", "unsupported", message)])
    inputs = tuple(inputs_of(body["input"]))
    vectors: list[tuple[int, list[float]]] = await state.supervisor.call(
        lambda call_id: Embed(call_id, inputs)
    )
    as_base64 = body.get("encoding_format") == "base64"
    prompt_tokens = sum(n_tokens for n_tokens, _ in vectors)
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _packed(vector) if as_base64 else vector,
        }
        for index, (_, vector) in enumerate(vectors)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    answer = {"object": "list", "data": data, "model": state.model_ref, "usage": usage}
    return json_response(answer)


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


async def models(request: Request) -> Response:
    state = state_of(request)
    return json_response({"object": "list", "data": [_model(state)]})


async def model(request: Request) -> Response:
    state = state_of(request)
    entry = _model(state)
    if request.path_params["model"] not in state.model_names:
        raise ModelNotFound(f"this worker serves {state.model_names[-1]!r} and no other model")
    return json_response(entry)


def _model(state: AppState) -> dict[str, Any]:
    info = _info(state)
    return {
        "id": state.model_ref,
        "object": "model",
        "created": int(time.time() - (time.monotonic() - state.started_at)),
        "owned_by": "llorch-worker",
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
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{model:path}", model, methods=["GET"]),
]
