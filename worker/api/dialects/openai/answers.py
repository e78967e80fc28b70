"""The types of OpenAI's answers; `/openapi.json` publishes them. Pure data."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from worker.api.chat.message import FinishReason

Count = Annotated[int, Field(ge=0)]


class CachedTokens(TypedDict):
    cached_tokens: Count


class ReasoningTokens(TypedDict):
    reasoning_tokens: Count


class Usage(TypedDict):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: Count


class CalledFunction(TypedDict):
    name: str
    arguments: str


class CallAnswer(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallAnswer]]


class ChatChoice(TypedDict):
    index: Count
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: dict[str, float]


class TextChoice(TypedDict):
    index: Count
    text: str
    logprobs: dict[str, Any] | None
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]
    finish_reason: FinishReason


class TextCompletion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage
    timings: dict[str, float]


class ModelEntry(TypedDict):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    parent: None
    meta: dict[str, Any]


class Models(TypedDict):
    object: Literal["list"]
    data: list[ModelEntry]
