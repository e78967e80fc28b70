"""OpenAI's bodies as requests. Pure functions, any thread."""

from __future__ import annotations

import uuid

from worker.api.chat.fields import prompts_of
from worker.api.chat.request import Chat, Generate, OneTool
from worker.api.dialects.openai.schema import ChatBody, CompletionBody, FunctionChoice
from worker.api.http.faults import fault, invalid
from worker.api.http.state import AppState
from worker.wire.work import InfillPrompt, MarkedPrompt, MixedTokens, Prompt

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for plain completions."""


def read_chat(body: ChatBody, state: AppState) -> Generate:
    """
    Raises:
        InvalidRequest: the fields do not fit together.
    """
    faults, form = [], body.response_format
    if body.max_tokens == 0:
        message = "max_tokens must be an integer of at least 1, or -1"
        faults.append(fault("max_tokens", "minimum", message, 0))
    if body.top_logprobs is not None and not body.logprobs:
        faults.append(fault("top_logprobs", "requires", "top_logprobs needs logprobs: true"))
    if form and form.type == "json_schema" and not (form.json_schema or form.schema_):
        message = "response_format.json_schema is required: an object with a schema"
        faults.append(fault("response_format.json_schema", "required", message))
    if faults:
        raise invalid(faults)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return body.generate(state, f"chatcmpl-{uuid.uuid4().hex}", chat_of(body), logprobs=logprobs)


def chat_of(body: ChatBody) -> Chat:
    choice = body.tool_choice
    variables = {} if body.verbosity is None else {"verbosity": body.verbosity}
    return body.chat(
        OneTool(choice.function.name, "tool_choice.function.name")
        if isinstance(choice, FunctionChoice)
        else choice or "auto",
        body.parallel_tool_calls,
        variables,
        body.reasoning,
    )


def read_completion(body: CompletionBody, state: AppState) -> Generate:
    """
    Raises:
        InvalidRequest: the fields do not fit together.
    """
    prompts = tuple(_with_suffix(prompt, body.suffix) for prompt in prompts_of(body.prompt))
    if body.echo and not all(isinstance(prompt, str | tuple) for prompt in prompts):
        message = "echo goes with a prompt of text and tokens, without media and suffix"
        raise invalid([fault("echo", "conflict", message)])
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return body.generate(
        state,
        f"cmpl-{uuid.uuid4().hex}",
        prompts,
        logprobs=body.logprobs,
        prompt_logprobs=max((n for n in wanted if n is not None), default=None),
        echo=body.echo,
        max_tokens=DEFAULT_COMPLETION_TOKENS,
    )


def _with_suffix(prompt: str | MixedTokens | MarkedPrompt, suffix: str | None) -> Prompt:
    if not suffix:
        return prompt
    if not isinstance(prompt, str):
        message = "suffix goes with a prompt of text only"
        raise invalid([fault("suffix", "conflict", message)])
    return InfillPrompt(prompt, suffix)
