"""Anthropic's paths."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.prompt import chat_prompt
from worker.api.chat.run import count_tokens, respond
from worker.api.dialects.anthropic.errors import ERRORS, STREAM
from worker.api.dialects.anthropic.schema import MessagesBody, PromptBody, chat_of
from worker.api.dialects.anthropic.stream import MessageAnswer, MessageStream, TokenCount
from worker.api.dialects.openai.generation import chat_generation
from worker.api.http.body import deadline_of, read_as
from worker.api.http.encoding import json_response
from worker.api.http.operation import JSON, MODEL_ERRORS, SSE, Dialect, Events, Operation
from worker.api.http.state import state_of


async def messages(request: Request) -> Response:
    state, deadline = state_of(request), deadline_of(request)
    chat = await read_as(request, state, MessagesBody, chat_of)
    generation = chat_generation(chat, state, deadline, prefix="msg_")
    return await respond(
        request,
        generation,
        lambda outputs: MessageStream(generation.id, state.model_name, outputs[0]),
    )


async def counted(request: Request) -> Response:
    state = state_of(request)
    chat = await read_as(request, state, PromptBody, chat_of)
    state.require_model(chat.model)
    prompt = chat_prompt(chat, state, tools=chat.tool_choice != "none")
    return json_response({"input_tokens": await count_tokens(request, prompt)})


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
