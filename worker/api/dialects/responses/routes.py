"""`/v1/responses`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.output import Output
from worker.api.chat.run import respond
from worker.api.dialects.openai.answers import InputTokens
from worker.api.dialects.openai.generation import chat_generation
from worker.api.dialects.openai.routes import counted
from worker.api.dialects.responses.schema import ResponsesBody, chat_of, hosted_tools
from worker.api.dialects.responses.stream import STREAM, ResponseAnswer, ResponseStream
from worker.api.http.body import deadline_of, read_as
from worker.api.http.errors import NESTED
from worker.api.http.operation import JSON, MODEL_ERRORS, SSE, Dialect, Events, Operation
from worker.api.http.state import state_of


async def responses(request: Request) -> Response:
    state, deadline = state_of(request), deadline_of(request)
    body, chat = await read_as(request, state, ResponsesBody, lambda body: (body, chat_of(body)))
    generation = chat_generation(chat, state, deadline, prefix="resp_")
    request.scope["state"].setdefault("ignored_fields", []).extend(hosted_tools(body))

    def answer(outputs: list[Output]) -> ResponseStream:
        id, created = generation.id, generation.created
        return ResponseStream(id, created, state.model_name, body, outputs[0])

    return await respond(request, generation, answer)


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
