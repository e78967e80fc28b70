"""Anthropic's paths."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.run import count_tokens, respond
from worker.api.dialects.anthropic.errors import ERRORS, STREAM
from worker.api.dialects.anthropic.schema import MessagesBody, PromptBody, chat_of, read
from worker.api.dialects.anthropic.stream import MessageAnswer, MessageObject, TokenCount
from worker.api.http.body import read_as
from worker.api.http.encoding import json_response
from worker.api.http.operation import JSON, MODEL_ERRORS, SSE, Dialect, Events, Operation
from worker.api.http.state import state_of


async def messages(request: Request) -> Response:
    return await respond(request, MessagesBody, read, MessageAnswer)


async def counted(request: Request) -> Response:
    state = state_of(request)
    model, chat = await read_as(
        request, state, PromptBody, lambda body: (body.model, chat_of(body))
    )
    state.require_model(model)
    return json_response({"input_tokens": await count_tokens(request, chat)})


OPERATIONS = [
    Operation(
        "POST", "/v1/messages", messages, "Anthropic's messages",
        {JSON: MessageObject, SSE: Events}, body=MessagesBody, errors=MODEL_ERRORS,
    ),
    Operation(
        "POST", "/v1/messages/count_tokens", counted, "Tokens of a prompt",
        {JSON: TokenCount}, body=PromptBody, errors=MODEL_ERRORS,
    ),
]  # fmt: skip
DIALECT = Dialect(OPERATIONS, ERRORS, {SSE: STREAM}, root="/v1/messages/")
