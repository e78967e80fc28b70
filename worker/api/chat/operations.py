"""The two operations that every dialect of chats has: to generate, and to count a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.dialect import Answer, Body, Read
from worker.api.chat.links import with_media
from worker.api.chat.prompt import chat_prompt
from worker.api.chat.request import Chat
from worker.api.chat.run import answered, respond
from worker.api.http.body import in_background, read_as
from worker.api.http.encoding import json_response
from worker.api.http.operation import JSON, MODEL_ERRORS, AsInReference, Events, Operation
from worker.api.http.state import AppState
from worker.wire.work import CountPrompt


def generation(
    path: str,
    summary: str,
    body: type[Body],
    read: Read[Body],
    answer: type[Answer[Any]],
) -> Operation:
    """`POST path`, streamed or whole."""
    endpoint = partial(respond, body=body, read=read, answer_of=answer)
    media_type = answer.media_type.partition(";")[0]
    answers = {JSON: AsInReference, media_type: Events}
    return Operation("POST", path, endpoint, summary, answers, body=body, errors=MODEL_ERRORS)


def counting(
    path: str,
    body: type[Body],
    read: Callable[[Body], tuple[str | None, Chat]],
    told: Callable[[int], Mapping[str, Any]],
) -> Operation:
    """`POST path`: how many tokens a chat has as the model's template writes it.

    `read` gives the model's name and the chat; `told` is the answer.
    """

    async def count(request: Request, state: AppState) -> Response:
        model, chat = await read_as(request, state, body, read)
        state.require_model(model)
        prompt = await with_media(await in_background(partial(chat_prompt, chat, state)), state)
        return json_response(told(await answered(request, state, CountPrompt(prompt))))

    return Operation("POST", path, count, "Tokens of a prompt", body=body, errors=MODEL_ERRORS)
