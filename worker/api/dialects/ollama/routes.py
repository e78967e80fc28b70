"""Ollama's paths."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.request import Generate
from worker.api.chat.run import respond
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
    ChatObject,
    GenerateAnswer,
    GenerateObject,
)
from worker.api.http.encoding import json_response
from worker.api.http.operation import JSON, MODEL_ERRORS, NDJSON, Dialect, Events, Operation
from worker.api.http.state import AppState


async def chat(request: Request) -> Response:
    return await respond(request, ChatBody, _read_chat, ChatAnswer)


async def generate(request: Request) -> Response:
    return await respond(request, GenerateBody, _read_generate, GenerateAnswer)


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
    head = {"model": tagged(state.model_name), "created_at": now()}
    return json_response({**head, **empty, "done": True, "done_reason": "load"})


OPERATIONS = [
    Operation(
        "POST", "/api/chat", chat, "Ollama's chats", {JSON: ChatObject, NDJSON: Events},
        body=ChatBody, errors=MODEL_ERRORS,
    ),
    Operation(
        "POST", "/api/generate", generate, "Ollama's completions",
        {JSON: GenerateObject, NDJSON: Events}, body=GenerateBody, errors=MODEL_ERRORS,
    ),
]  # fmt: skip
DIALECT = Dialect([*MODELS, *EMBEDDINGS, *OPERATIONS], ERRORS, {NDJSON: LINES}, untagged, "/api/")
