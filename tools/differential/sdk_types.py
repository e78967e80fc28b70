"""Parses the worker's answers strictly with the types of its clients' SDKs.

The SDKs' models accept unknown fields; here each of these must be in `EXTRA`, which lists the
fields that other clients read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import anthropic.types
import ollama
import openai.types
import openai.types.chat
import openai.types.responses
from pydantic import BaseModel, TypeAdapter, ValidationError

from tools.differential.asking import Answered, Asked

EXTRA = {
    "timings", "prompt_progress", "reasoning_content", "prompt_logprobs", "name",
    "aliases", "tags", "root", "parent", "meta", "architecture", "status", "store",
    "capabilities", "context_length", "embedding_length",
}  # fmt: skip
"""Fields of OpenAI and Ollama that their SDKs lack, such as the name of a call whose arguments are
done, and fields of llama-server and vLLM, which llama-swap, llama.cpp's page, routers and chat
pages read."""

WHOLE: dict[str, Any] = {
    "/chat/completions": openai.types.chat.ChatCompletion,
    "/completions": openai.types.Completion,
    "/embeddings": openai.types.CreateEmbeddingResponse,
    "/responses": openai.types.responses.Response,
    "/messages": anthropic.types.Message,
    "/messages/count_tokens": anthropic.types.MessageTokensCount,
    "/api/chat": ollama.ChatResponse,
    "/api/generate": ollama.GenerateResponse,
    "/api/embed": ollama.EmbedResponse,
    "/api/tags": ollama.ListResponse,
    "/api/ps": ollama.ProcessResponse,
    "/api/show": ollama.ShowResponse,
}
STREAMED: dict[str, Any] = {
    "/chat/completions": openai.types.chat.ChatCompletionChunk,
    "/completions": openai.types.Completion,
    "/responses": openai.types.responses.ResponseStreamEvent,
    "/messages": anthropic.types.RawMessageStreamEvent,
    "/api/chat": ollama.ChatResponse,
    "/api/generate": ollama.GenerateResponse,
}


def faults(asked: Asked, answer: Answered) -> Iterator[str]:
    """Yield what the path's SDK does not accept; nothing for a refusal and for other paths."""
    path = asked.path.removeprefix("/v1")
    kind = (STREAMED if answer.events else WHOLE).get(path)
    in_their_form = bool({"content", "encoding_format"} & set(asked.body or ()))
    in_their_form |= isinstance(answer.whole, list)
    if answer.status != 200 or kind is None or in_their_form:
        return
    for given in answer.events or [answer.whole]:
        if given != "[DONE]":
            yield from _faults_of(kind, given)


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _faults_of(kind: Any, given: Any) -> Iterator[str]:
    try:
        found = _reader(kind).validate_json(json.dumps(given), strict=True)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            if each["loc"][-1] == "finish_reason" and each["input"] is None:
                continue  # OpenAI's own streams have null until the end, whatever the type says
            yield f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
        return
    for name in _extras(found, ""):
        if name.rpartition(".")[2] not in EXTRA:
            yield f"{name}: the SDK has no such field"


def _extras(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _extras(each, path)
    if isinstance(value, BaseModel):
        yield from (f"{path}.{name}".lstrip(".") for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from _extras(getattr(value, name), f"{path}.{name}".lstrip("."))
