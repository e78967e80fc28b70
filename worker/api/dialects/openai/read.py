"""OpenAI's bodies as requests. Pure functions, any thread."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from worker.api.chat.fields import ANY_OBJECT, inputs_of
from worker.api.chat.format import Format, JsonSchema
from worker.api.chat.request import Chat, Generate, OneTool
from worker.api.dialects.openai.schema import ChatBody, CompletionBody, FunctionChoice
from worker.api.http.faults import Fault, fault, invalid
from worker.api.http.state import AppState
from worker.wire.work import InfillPrompt, Prompt

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for plain completions."""


def read_chat(body: ChatBody, state: AppState) -> Generate:
    """
    Raises:
        InvalidRequest: the fields do not fit together.
    """
    if faults := list(_chat_faults(body)):
        raise invalid(faults)
    return body.generate(
        state,
        f"chatcmpl-{uuid.uuid4().hex}",
        chat_of(body),
        format=_format_of(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def chat_of(body: ChatBody) -> Chat:
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        return body.chat(
            OneTool(choice.function.name, "tool_choice.function.name"), body.parallel_tool_calls
        )
    return body.chat(choice or "auto", body.parallel_tool_calls)


def read_completion(body: CompletionBody, state: AppState) -> Generate:
    """
    Raises:
        InvalidRequest: the fields do not fit together.
    """
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return body.generate(
        state,
        f"cmpl-{uuid.uuid4().hex}",
        tuple(_with_suffix(prompt, body.suffix) for prompt in inputs_of(body.prompt)),
        format=body.format,
        logprobs=body.logprobs,
        prompt_logprobs=max((n for n in wanted if n is not None), default=None),
        echo=body.echo,
        max_tokens=DEFAULT_COMPLETION_TOKENS,
    )


def _with_suffix(prompt: str | tuple[int, ...], suffix: str | None) -> Prompt:
    if not suffix:
        return prompt
    if isinstance(prompt, tuple):
        message = "suffix goes with a prompt of text only"
        raise invalid([fault("suffix", "conflict", message)])
    return InfillPrompt(prompt, suffix)


def _chat_faults(body: ChatBody) -> Iterator[Fault]:
    if body.max_tokens == 0:
        message = "max_tokens must be an integer of at least 1, or -1"
        yield fault("max_tokens", "minimum", message, 0)
    if body.top_logprobs is not None and not body.logprobs:
        yield fault("top_logprobs", "requires", "top_logprobs needs logprobs: true")
    form = body.response_format
    if form is not None and form.type == "json_schema" and not (form.json_schema or form.schema_):
        message = "response_format.json_schema is required: an object with a schema"
        yield fault("response_format.json_schema", "required", message)


def _format_of(body: ChatBody) -> Format | None:
    form = body.response_format
    if form is None or form.type == "text":
        return body.format
    if form.json_schema is not None:
        path, strict = "response_format.json_schema.schema", form.json_schema.strict is True
        return JsonSchema(form.json_schema.schema_, path, strict)
    if form.schema_ is not None:
        return JsonSchema(form.schema_, "response_format.schema")
    return JsonSchema(ANY_OBJECT, "response_format")
