"""Ollama's bodies as pydantic models, and their conversion to requests. Any thread."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from worker.api.chat.answer import ModelOnly
from worker.api.chat.chat_fields import MAX_MESSAGES, ChatFields, MessageFields
from worker.api.chat.field_types import (
    ANY_OBJECT,
    ByKind,
    FlagOrWord,
    ModelName,
    Stops,
    TopLogprobs,
)
from worker.api.chat.fields import OwnFields
from worker.api.chat.media import MAX_MEDIA, medium_of, named_medium
from worker.api.chat.request import Chat, Content, Generate, JsonSchema, Message, ReasoningOptions
from worker.api.chat.sampling import LLAMA_CPP_WINDOW, SamplingFields
from worker.api.dialects.ollama.naming import now, served, tagged
from worker.api.http.body import Flag, Integer, JsonObject, Many, Refused
from worker.api.http.faults import refusal
from worker.api.http.state import AppState
from worker.wire.work import InfillPrompt, Prompt

Images = Annotated[Many[str], Field(max_length=MAX_MEDIA, description="pictures and sounds")]
Format = Annotated[
    Annotated[Literal["", "json"], Tag("~text")] | Annotated[JsonObject, Tag("~object")], ByKind
]
Think = FlagOrWord[Literal["low", "medium", "high", "max"]]


class Options(SamplingFields):
    """Options of generation; those of loading are ignored."""

    num_predict: Integer | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="the most tokens; below 1: no limit"
    )
    stop: Stops = ()

    counted_tokens = LLAMA_CPP_WINDOW


class Turn(MessageFields):
    name: str | None = Field(None, validation_alias="tool_name")
    reasoning_content: str | None = Field(None, validation_alias="thinking")
    images: Images = ()

    def message(self, path: str) -> Message:
        """The message; as in Ollama, its pictures precede the text."""
        plain = super().message(path)
        pictures = _pictures(self.images, f"{path}.images")
        return replace(plain, content=(*pictures, *(plain.content or ()))) if pictures else plain


def _pictures(images: tuple[str, ...], path: str) -> Content:
    """Pictures and sounds, which Ollama has in the same field and distinguishes by their bytes."""
    placed = ((f"{path}[{index}]", image) for index, image in enumerate(images))
    return tuple(
        named_medium("image", image, field)
        if image.startswith(("data:", "http:", "https:"))
        else medium_of(None, image, field)
        for field, image in placed
    )


class GenerationBody(OwnFields):
    """The common fields of `/api/chat` and `/api/generate`."""

    model: ModelName
    stream: Flag = True
    format: Format = Field("", description="json, or a JSON schema that the answer must follow")
    think: Think | None = Field(None, description="whether, or how much, the model reasons")
    options: Options = Field(default_factory=lambda: Options.model_validate({}))
    logprobs: Flag = Field(False, description="report log-probabilities of the answer's tokens")
    top_logprobs: TopLogprobs = Field(0, description="alternatives to report per token")
    template: Annotated[Any, Refused("leave it out")] = None
    debug_render_only: Annotated[Any, Refused("use /apply-template")] = Field(
        None, validation_alias="_debug_render_only"
    )

    @property
    def reasoning(self) -> ReasoningOptions:
        if self.think is None:
            return ReasoningOptions()
        level = self.think if isinstance(self.think, str) else None
        return ReasoningOptions(effort=level, enabled=self.think is not False)

    def generate(self, input: Chat | tuple[Prompt, ...], state: AppState) -> Generate:
        options, limit = self.options, self.options.num_predict
        unused = {
            "think": self.think is not None and not isinstance(input, Chat),
            "top_logprobs": self.top_logprobs > 0 and not self.logprobs,
        }
        return Generate(
            input=input,
            sampling=options.sampling(state, self.top_logprobs if self.logprobs else None),
            max_tokens=limit if limit is not None and limit > 0 else None,
            formats=self._formats,
            stop=options.stop,
            ignored=tuple(name for name, is_unused in unused.items() if is_unused),
            **self.own("ollama-") | {"model": served(self.model, state)},
        )

    @property
    def _formats(self) -> tuple[JsonSchema, ...]:
        if isinstance(self.format, str):
            return (JsonSchema(ANY_OBJECT, "format"),) if self.format == "json" else ()
        return (JsonSchema(self.format, "format"),)


class ChatBody(GenerationBody, ChatFields):
    """A chat to answer. Without messages, the request only loads the model."""

    messages: Many[Turn] = Field((), max_length=MAX_MESSAGES)

    goes_on = True


class GenerateBody(GenerationBody):
    """A text to continue. Without a prompt, the request only loads the model."""

    prompt: str = ""
    suffix: str = Field("", description="the text after the answer")
    system: str = Field("", description="a system message")
    raw: Flag = Field(False, description="do not apply the chat template to the prompt")
    images: Images = ()
    context: Annotated[Any, Refused("send the conversation to /api/chat")] = None


def read_chat(body: ChatBody, state: AppState) -> Generate | ModelOnly:
    if not body.messages:
        return _loaded(body, state, {"message": {"role": "assistant", "content": ""}})
    return body.generate(body.chat(reasoning=body.reasoning), state)


def read_generate(body: GenerateBody, state: AppState) -> Generate | ModelOnly:
    """
    Raises:
        InvalidRequest: pictures or a system text without a chat template to put them into.
    """
    if not (body.prompt or body.suffix):
        return _loaded(body, state, {"response": ""})
    if not (body.raw or body.suffix) and state.served.has_chat_template:
        system = (Message("system", (body.system,)),) if body.system else ()
        content = (*_pictures(body.images, "images"), body.prompt)
        messages = (*system, Message("user", content))
        return body.generate(Chat(messages, reasoning=body.reasoning, path="prompt"), state)
    if body.images:
        raise refusal("images", "conflict", "require a prompt that is put into a chat template")
    if body.system:
        raise refusal("system", "conflict", "requires a prompt that is put into a chat template")
    prompt = InfillPrompt(body.prompt, body.suffix) if body.suffix else body.prompt
    return body.generate((prompt,), state)


def _loaded(body: GenerationBody, state: AppState, empty: dict[str, object]) -> ModelOnly:
    """The answer to a request that only loads the model."""
    state.require_model(name := served(body.model, state))
    state.loaded()
    head = {"model": tagged(state.name_of(name)), "created_at": now()}
    unloads = _unloads(body)
    reason = "unload" if unloads else "load"
    answer = {**head, **empty, "done": True, "done_reason": reason}
    return ModelOnly(answer, is_wanted=not unloads)


def _unloads(body: GenerationBody) -> bool:
    """Whether `keep_alive` asks to unload the model at once. The model stays, so the field counts
    as ignored, but clients wait for Ollama's `done_reason`."""
    value = (body.model_extra or {}).get("keep_alive")
    if isinstance(value, str):
        return re.fullmatch(r"[+-]?0+(\.0+)?(ns|us|µs|ms|s|m|h)?", value.strip()) is not None
    return value == 0 and value is not False
