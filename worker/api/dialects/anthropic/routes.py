"""Anthropic's paths."""

from __future__ import annotations

import uuid
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.request import Generate
from worker.api.chat.run import count_tokens, respond
from worker.api.dialects.anthropic.errors import ERRORS, STREAM
from worker.api.dialects.anthropic.schema import MessagesBody, PromptBody, chat_of
from worker.api.dialects.anthropic.stream import MessageAnswer, MessageStream, TokenCount
from worker.api.dialects.openai.read import chat_of as openai_chat_of
from worker.api.dialects.openai.read import read_chat
from worker.api.http.body import read_as
from worker.api.http.encoding import json_response
from worker.api.http.operation import JSON, MODEL_ERRORS, SSE, Dialect, Events, Operation
from worker.api.http.state import AppState, state_of


async def messages(request: Request) -> Response:
    return await respond(request, MessagesBody, read_messages, MessageStream)


def read_messages(body: MessagesBody, state: AppState) -> Generate:
    return replace(read_chat(chat_of(body), state), id=f"msg_{uuid.uuid4().hex}")


async def counted(request: Request) -> Response:
    state = state_of(request)
    chat = await read_as(request, state, PromptBody, chat_of)
    state.require_model(chat.model)
    n_tokens = await count_tokens(request, openai_chat_of(chat))
    return json_response({"input_tokens": n_tokens})


OPERATIONS = [
    Operation(
        "POST", "/v1/messages", messages, "Anthropic's messages",
        {JSON: MessageAnswer, SSE: Events}, body=MessagesBody, errors=MODEL_ERRORS,
    ),
    Operation(
        "POST", "/v1/messages/count_tokens", counted, "Tokens of a prompt",
        {JSON: TokenCount}, body=PromptBody, errors=MODEL_ERRORS,
    ),
]  # fmt: skip
DIALECT = Dialect(OPERATIONS, ERRORS, {SSE: STREAM}, root="/v1/messages/")
