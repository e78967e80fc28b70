"""`/v1/responses`."""

from __future__ import annotations

import uuid
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.request import Generate
from worker.api.chat.run import respond
from worker.api.dialects.openai.answers import InputTokens
from worker.api.dialects.openai.read import read_chat
from worker.api.dialects.openai.routes import counted
from worker.api.dialects.responses.schema import ResponsesBody, chat_of, hosted_tools
from worker.api.dialects.responses.stream import STREAM, ResponseAnswer, ResponseStream
from worker.api.http.body import read_as
from worker.api.http.errors import NESTED
from worker.api.http.operation import JSON, MODEL_ERRORS, SSE, Dialect, Events, Operation
from worker.api.http.state import AppState, state_of


async def responses(request: Request) -> Response:
    return await respond(request, ResponsesBody, read_response, ResponseStream)


def read_response(body: ResponsesBody, state: AppState) -> Generate:
    asked = read_chat(chat_of(body), state)
    return replace(asked, id=f"resp_{uuid.uuid4().hex}", ignored=tuple(hosted_tools(body)))


async def input_tokens(request: Request) -> Response:
    chat = await read_as(request, state_of(request), ResponsesBody, chat_of)
    return await counted(request, chat)


OPERATIONS = [
    operation
    for path in ("/v1/responses", "/responses")
    for operation in (
        Operation(
            "POST", path, responses, "OpenAI's responses, nothing stored",
            {JSON: ResponseAnswer, SSE: Events}, body=ResponsesBody, errors=MODEL_ERRORS,
        ),
        Operation(
            "POST", f"{path}/input_tokens", input_tokens, "Tokens of a prompt",
            {JSON: InputTokens}, body=ResponsesBody, errors=MODEL_ERRORS,
        ),
    )
]  # fmt: skip
DIALECT = Dialect(OPERATIONS, NESTED, {SSE: STREAM})
