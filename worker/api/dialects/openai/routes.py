"""OpenAI's paths."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request

from worker.api.chat.run import counting, generation
from worker.api.dialects.openai.embeddings import OPERATIONS as EMBEDDINGS
from worker.api.dialects.openai.schema import (
    ChatBody,
    CompletionBody,
    chat_of,
    read_chat,
    read_completion,
)
from worker.api.dialects.openai.stream import CHUNK_STREAM, ChatAnswer, CompletionAnswer
from worker.api.http.errors import NESTED
from worker.api.http.operation import SSE, Dialect, Operation, joined_in
from worker.api.http.state import AppState
from worker.errors import ModelNotFound


async def models(request: Request, state: AppState) -> object:
    return {"object": "list", "data": [_model(state, name) for name in state.all_names]}


async def model(request: Request, state: AppState) -> object:
    name = request.path_params["model"]
    if name not in state.all_names:
        served = " and ".join(map(repr, state.all_names))
        raise ModelNotFound(f"this worker serves {served} and no other model")
    return _model(state, name)


def _model(state: AppState, name: str) -> dict[str, Any]:
    info, is_adapter = state.loaded(), name in state.adapters.names
    return {
        "id": name,
        "aliases": state.model_names,
        "tags": [],
        "object": "model",
        "created": int(time.time() - state.supervisor.status().uptime_seconds),
        "owned_by": "llorch-worker",
        # As a router of llama-server has it, whose page chooses among a fleet's models by it.
        "status": {"value": "sleeping" if state.supervisor.state == "sleeping" else "loaded"},
        "root": name if is_adapter else state.model_name,
        "parent": state.model_name if is_adapter else None,
        "meta": {
            "ftype": info.model.quant_kind,
            "n_vocab": info.model.vocab_size,
            "n_ctx": info.model.context_length,
            "n_ctx_train": info.model.trained_context_length,
            "n_embd": info.model.embedding_length,
            "n_params": info.model.n_params,
            "size": info.model.size_bytes,
        },
        "architecture": {
            "input_modalities": ["text", *_media(state)],
            "output_modalities": ["text"],
        },
    }


def _media(state: AppState) -> list[str]:
    names = {"vision": "image", "audio": "audio"}
    return [names[name] for name, is_taken in state.served.modalities.items() if is_taken]


_REFERENCE = "https://platform.openai.com/docs/api-reference"
OPERATIONS = [
    operation
    for prefix in ("/v1", "")
    for operation in (
        generation(
            f"{prefix}/chat/completions", "OpenAI's chat completions",
            ChatBody, read_chat, ChatAnswer,
        ),
        counting(
            f"{prefix}/chat/completions/input_tokens", ChatBody,
            lambda body: (body.model, chat_of(body)),
            lambda n_tokens: {"object": "response.input_tokens", "input_tokens": n_tokens},
        ),
        generation(
            f"{prefix}/completions", "OpenAI's completions",
            CompletionBody, read_completion, CompletionAnswer,
        ),
        Operation(
            "GET", f"{prefix}/models", models, "The model served", errors=(503,),
            asks="groups", joined=joined_in("data"),
        ),
        Operation(
            "GET", f"{prefix}/models/{{model:path}}", model, "The model served",
            errors=(404, 503),
        ),
    )
]  # fmt: skip
DIALECT = Dialect(
    [*OPERATIONS, *EMBEDDINGS],
    NESTED,
    {SSE: CHUNK_STREAM},
    reference=_REFERENCE,
    root="/v1/",
)
