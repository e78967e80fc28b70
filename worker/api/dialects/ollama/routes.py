"""Ollama's paths."""

from __future__ import annotations

from starlette.responses import Response

from worker.api.chat.request import Generate
from worker.api.chat.run import generation
from worker.api.dialects.ollama.embed import OPERATIONS as EMBEDDINGS
from worker.api.dialects.ollama.errors import ERRORS, LINES
from worker.api.dialects.ollama.models import OPERATIONS as MODELS
from worker.api.dialects.ollama.naming import now, served, tagged, untagged
from worker.api.dialects.ollama.schema import (
    ChatBody,
    GenerateBody,
    chat_request,
    generate_request,
)
from worker.api.dialects.ollama.stream import (
    ChatAnswer,
    GenerateAnswer,
)
from worker.api.http.encoding import json_response
from worker.api.http.operation import NDJSON, Dialect
from worker.api.http.state import AppState


def _read_chat(body: ChatBody, state: AppState) -> Generate | Response:
    if body.messages:
        return chat_request(body, state)
    return _loaded(body, state, {"message": {"role": "assistant", "content": ""}})


def _read_generate(body: GenerateBody, state: AppState) -> Generate | Response:
    if body.prompt or body.suffix:
        return generate_request(body, state)
    return _loaded(body, state, {"response": ""})


def _loaded(body: ChatBody | GenerateBody, state: AppState, empty: dict[str, object]) -> Response:
    """The answer to a request that only wants the model loaded, which it always is."""
    state.require_model(served(body.model, state))
    state.loaded()
    name = state.name_of(served(body.model, state))
    head = {"model": tagged(name), "created_at": now()}
    return json_response({**head, **empty, "done": True, "done_reason": "load"})


_REFERENCE = "https://docs.ollama.com/api"
OPERATIONS = [
    generation("/api/chat", "Ollama's chats", ChatBody, _read_chat, ChatAnswer),
    generation(
        "/api/generate", "Ollama's completions",
        GenerateBody, _read_generate, GenerateAnswer,
    ),
]  # fmt: skip
DIALECT = Dialect(
    [*MODELS, *EMBEDDINGS, *OPERATIONS], ERRORS, {NDJSON: LINES}, untagged, _REFERENCE, "/api/"
)
