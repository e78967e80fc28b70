"""`/v1/responses`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from worker.api.chat.run import count_tokens, respond
from worker.api.dialects.responses.schema import ResponsesBody, chat_of, read
from worker.api.dialects.responses.stream import STREAM, ResponseAnswer, ResponseObject
from worker.api.http.body import read_as
from worker.api.http.encoding import json_response
from worker.api.http.errors import NESTED
from worker.api.http.operation import JSON, MODEL_ERRORS, SSE, Dialect, Events, Operation
from worker.api.http.state import state_of


class InputTokens(TypedDict):
    object: str
    input_tokens: int


async def responses(request: Request) -> Response:
    return await respond(request, ResponsesBody, read, ResponseAnswer)


async def input_tokens(request: Request) -> Response:
    state = state_of(request)
    model, chat = await read_as(
        request, state, ResponsesBody, lambda body: (body.model, chat_of(body))
    )
    state.require_model(model)
    n_tokens = await count_tokens(request, chat)
    return json_response({"object": "response.input_tokens", "input_tokens": n_tokens})


OPERATIONS = [
    operation
    for path in ("/v1/responses", "/responses")
    for operation in (
        Operation(
            "POST", path, responses, "OpenAI's responses, nothing stored",
            {JSON: ResponseObject, SSE: Events}, body=ResponsesBody, errors=MODEL_ERRORS,
        ),
        Operation(
            "POST", f"{path}/input_tokens", input_tokens, "Tokens of a prompt",
            {JSON: InputTokens}, body=ResponsesBody, errors=MODEL_ERRORS,
        ),
    )
]  # fmt: skip
DIALECT = Dialect(OPERATIONS, NESTED, {SSE: STREAM})
