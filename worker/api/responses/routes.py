"""`/v1/responses`. The endpoint runs on the API process's event loop."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from worker.api.body import deadline_of, read_as
from worker.api.encoding import json_response
from worker.api.event_stream import EventStream, closing_on_disconnect
from worker.api.jobs import start_jobs, with_head
from worker.api.openai.answers import InputTokens
from worker.api.openai.generation import chat_generation
from worker.api.openai.routes import counted
from worker.api.operation import JOB_ERRORS, JSON, SSE, Events, Operation
from worker.api.output import merged
from worker.api.responses.schema import ResponsesBody, chat_of, hosted_tools
from worker.api.responses.stream import ResponseAnswer, ResponseStream
from worker.api.state import state_of


async def responses(request: Request) -> Response:
    state, deadline = state_of(request), deadline_of(request)
    body, chat = await read_as(request, state, ResponsesBody, lambda body: (body, chat_of(body)))
    generation = chat_generation(chat, state, deadline, prefix="resp_")
    ignored = request.scope["state"].setdefault("ignored_fields", [])
    ignored += [*hosted_tools(body), *generation.not_enforced]
    jobs = await start_jobs(state, generation.requests)
    output = generation.outputs(jobs)[0]
    stream = ResponseStream(generation.id, generation.created, state.model_name, body, output)
    if not generation.stream:
        async with closing_on_disconnect(request, *jobs):
            return json_response(await stream.whole(merged(jobs)))
    frames = await with_head(request, jobs, merged(jobs), lambda frame: frame[1])
    return EventStream(stream.chunks(frames), state, jobs[0].cancel)


async def input_tokens(request: Request) -> Response:
    chat = await read_as(request, state_of(request), ResponsesBody, chat_of)
    return await counted(request, chat)


ROUTES = [
    operation
    for path in ("/v1/responses", "/responses")
    for operation in (
        Operation(
            "POST", path, responses, "OpenAI's responses, nothing stored",
            {JSON: ResponseAnswer, SSE: Events},
            body=ResponsesBody, errors=(*JOB_ERRORS, 404), deadline=True,
        ),
        Operation(
            "POST", f"{path}/input_tokens", input_tokens, "Tokens of a prompt",
            {JSON: InputTokens}, body=ResponsesBody, errors=(*JOB_ERRORS, 404), deadline=True,
        ),
    )
]  # fmt: skip
