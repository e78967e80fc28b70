"""OpenAI's paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from worker.api.chat.operations import counting, generation
from worker.api.dialects.openai.embeddings import OPERATIONS as EMBEDDINGS
from worker.api.dialects.openai.schema import (
    ChatBody,
    CompletionBody,
    read_chat,
    read_completion,
)
from worker.api.dialects.openai.stream import ChatAnswer, CompletionAnswer
from worker.api.http.encoding import rfc3339
from worker.api.http.errors import NESTED
from worker.api.http.operation import Dialect, Operation
from worker.api.http.state import AppState
from worker.errors import ModelNotFound


async def models(request: Request, state: AppState) -> object:
    return _listed([_model(state, name) for name in state.all_names])


def _listed(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """OpenAI's list and Anthropic's page in one, because both send clients to the same path."""
    ids = [entry["id"] for entry in entries] or [None]
    page = {"has_more": False, "first_id": ids[0], "last_id": ids[-1]}
    return {"object": "list", "data": entries, **page}


def _of_fleet(answers: Sequence[Any]) -> Any:
    return _listed([entry for answer in answers for entry in answer["data"]])


async def model(request: Request, state: AppState) -> object:
    name = request.path_params["model"]
    if name not in state.all_names:
        served = " and ".join(map(repr, state.all_names))
        raise ModelNotFound(f"this worker serves {served} and no other model")
    return _model(state, name)


def _model(state: AppState, name: str) -> dict[str, Any]:
    info, is_adapter = state.loaded(), name in state.adapters.names
    created = int(state.started_at)
    kinds = {"vision": "image", "audio": "audio"}
    media = [kinds[name] for name, is_taken in state.served.modalities.items() if is_taken]
    return {
        "id": name,
        "aliases": state.model_names,
        "tags": [],
        "object": "model",
        "created": created,
        "owned_by": "llorch-worker",
        # Fields for Anthropic's clients.
        "type": "model",
        "display_name": name,
        "created_at": rfc3339(created),
        "lifecycle": "active",
        "max_input_tokens": info.model.context_length,
        "max_tokens": state.served.max_tokens_out,
        # As from llama-server's router: the chat page uses it to choose among a fleet's models.
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
            "input_modalities": ["text", *media],
            "output_modalities": ["text"],
        },
    }


_REFERENCE = "https://platform.openai.com/docs/api-reference"
OPERATIONS = [
    operation
    for prefix in ("/v1", "")
    for operation in (
        generation(
            f"{prefix}/chat/completions", "Generate the next message of a chat, in OpenAI's form",
            ChatBody, read_chat, ChatAnswer,
        ),
        counting(
            f"{prefix}/chat/completions/input_tokens", ChatBody, ChatBody.reasoning_chat,
            object="response.input_tokens",
        ),
        generation(
            f"{prefix}/completions", "Continue a text, in OpenAI's form",
            CompletionBody, read_completion, CompletionAnswer,
        ),
        Operation(
            "GET", f"{prefix}/models", models,
            "List the models, for OpenAI's and Anthropic's clients", errors=(503,),
            asks="groups", joined=_of_fleet,
        ),
        Operation(
            "GET", f"{prefix}/models/{{model}}", model,
            "Describe a model, for OpenAI's and Anthropic's clients", errors=(404, 503),
        ),
    )
]  # fmt: skip
DIALECT = Dialect([*OPERATIONS, *EMBEDDINGS], NESTED, reference=_REFERENCE, root="/v1/")
