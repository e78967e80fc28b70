"""The operations that dialects of chats share: to generate, and to count a prompt's tokens. On the
event loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request

from worker.api.chat.answer import Answer, Body, Read
from worker.api.chat.prompt import chat_prompt
from worker.api.chat.request import Chat
from worker.api.chat.run import answered, respond, with_media
from worker.api.http.body import deadline_of, read_as
from worker.api.http.headers import LATE_HEAD, RESUME
from worker.api.http.operation import JSON, AsInReference, Operation
from worker.api.http.resume import KEEPING
from worker.api.http.state import AppState
from worker.wire.work import ChatPrompt, CountPrompt

STREAMING = (*KEEPING, LATE_HEAD)
"""The headers that are read from a request whose answer may stream."""


def generation(
    path: str, summary: str, body: type[Body], read: Read[Body], answer: type[Answer[Any]]
) -> Operation:
    """`POST path`, streamed or whole."""
    endpoint = partial(respond, body=body, read=read, answer_of=answer)
    media_type = answer.media_type.partition(";")[0]
    answers = {JSON: AsInReference, media_type: answer.form}
    return Operation(
        "POST", path, endpoint, summary, answers, body=body, reads=STREAMING, sends=(RESUME,)
    )


def counting(path: str, body: type[Any], chat_of: Callable[[Any], Chat], **more: str) -> Operation:
    """`POST path`: how many tokens a chat has once the model's template has rendered it. The answer
    also has the fields `more`."""

    async def count(request: Request, state: AppState) -> object:
        def prompt_of(parsed: Any) -> ChatPrompt:
            chat = chat_of(parsed)
            state.require_model(parsed.model)
            return chat_prompt(chat, state)

        deadline = deadline_of(request)
        prompt = await read_as(request, state, body, prompt_of)
        prompt = await with_media(prompt, state, deadline)
        return {**more, "input_tokens": await answered(request, state, CountPrompt(prompt))}

    return Operation("POST", path, count, "Count the tokens of a chat's prompt", body=body)
