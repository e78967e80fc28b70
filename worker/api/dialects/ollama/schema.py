"""Ollama's bodies as pydantic models, and the requests that they make. Any thread."""

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
    refused,
)
from worker.api.chat.fields import OwnFields
from worker.api.chat.media import MAX_MEDIA, medium_of, named_medium
from worker.api.chat.request import Chat, Content, Generate, JsonSchema, Message, ReasoningOptions
from worker.api.chat.sampling import LLAMA_CPP_WINDOW, SamplingFields
from worker.api.dialects.ollama.naming import now, served, tagged
from worker.api.http.body import Flag, Integer, JsonObject, Many
from worker.api.http.faults import refusal
from worker.api.http.state import AppState
from worker.wire.work import InfillPrompt, Prompt

Images = Annotated[Many[str], Field(max_length=MAX_MEDIA, description="pictures in base64")]
Format = Annotated[
    Annotated[Literal["", "json"], Tag("~text")] | Annotated[JsonObject, Tag("~object")], ByKind
]
Think = FlagOrWord[Literal["low", "medium", "high", "max"]]


class Options(SamplingFields):
    """What shapes the answer; options of the load are ignored by name."""

    num_predict: Integer | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="below 1 is all that the context leaves"
    )
    stop: Stops = ()

    counted_tokens = LLAMA_CPP_WINDOW


class Turn(MessageFields):
    name: str | None = Field(None, validation_alias="tool_name")
    reasoning_content: str | None = Field(None, validation_alias="thinking")
    images: Images = ()

    def message(self, path: str) -> Message:
        """As Ollama has it: the pictures precede the text."""
        plain = super().message(path)
        pictures = _pictures(self.images, f"{path}.images")
        return replace(plain, content=(*pictures, *(plain.content or ()))) if pictures else plain


def _pictures(images: tuple[str, ...], path: str) -> Content:
    """Pictures, and sounds: Ollama has no other field for these, and tells them by their bytes."""
    given = ((f"{path}[{index}]", image) for index, image in enumerate(images))
    return tuple(
        named_medium("image", image, field)
        if image.startswith(("data:", "http:", "https:"))
        else medium_of(None, image, field)
        for field, image in given
    )


class GenerationBody(OwnFields):
    """What `/api/chat` and `/api/generate` have in common."""

    model: ModelName
    stream: Flag = True
    format: Format = Field("", description="'json', or a JSON schema that the answer follows")
    think: Think | None = Field(None, description="whether the model reasons, or how much")
    options: Options = Field(default_factory=lambda: Options.model_validate({}))
    logprobs: Flag = False
    top_logprobs: TopLogprobs = 0
    template: Annotated[str, refused("leave it out")] = Field("", description="not honoured")

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
    """`POST /api/chat`; without messages, the model is loaded."""

    messages: Many[Turn] = Field((), max_length=MAX_MESSAGES)

    goes_on = True


class GenerateBody(GenerationBody):
    """`POST /api/generate`; without a prompt, the model is loaded."""

    prompt: str = ""
    suffix: str = Field("", description="what comes after the answer")
    system: str = ""
    raw: Flag = Field(False, description="the prompt is not put into the chat template")
    images: Images = ()
    context: Annotated[tuple[Any, ...], refused("send the conversation to /api/chat")] = Field(
        (), description="not honoured; send the conversation to /api/chat"
    )


def read_chat(body: ChatBody, state: AppState) -> Generate | ModelOnly:
    if not body.messages:
        return _loaded(body, state, {"message": {"role": "assistant", "content": ""}})
    return body.generate(body.chat(reasoning=body.reasoning), state)


def read_generate(body: GenerateBody, state: AppState) -> Generate | ModelOnly:
    """
    Raises:
        InvalidRequest: a system text that no template takes.
    """
    if not (body.prompt or body.suffix):
        return _loaded(body, state, {"response": ""})
    if not (body.raw or body.suffix) and state.served.has_chat_template:
        system = (Message("system", (body.system,)),) if body.system else ()
        content = (*_pictures(body.images, "images"), body.prompt)
        messages = (*system, Message("user", content))
        return body.generate(Chat(messages, reasoning=body.reasoning, path="prompt"), state)
    if body.images:
        raise refusal("images", "conflict", "go with a prompt that is put into a chat template")
    if body.system:
        raise refusal("system", "conflict", "goes with a prompt that is put into a chat template")
    prompt = InfillPrompt(body.prompt, body.suffix) if body.suffix else body.prompt
    return body.generate((prompt,), state)


def _loaded(body: GenerationBody, state: AppState, empty: dict[str, object]) -> ModelOnly:
    """The answer to a request that only wants the model loaded."""
    state.require_model(name := served(body.model, state))
    state.loaded()
    head = {"model": tagged(state.name_of(name)), "created_at": now()}
    is_to_go = _asks_to_unload(body)
    reason = "unload" if is_to_go else "load"
    answer = {**head, **empty, "done": True, "done_reason": reason}
    return ModelOnly(answer, is_wanted=not is_to_go)


def _asks_to_unload(body: GenerationBody) -> bool:
    """Whether the model is to go at once. It stays, so the field is named as ignored; but clients
    wait for the reason that Ollama gives."""
    given = (body.model_extra or {}).get("keep_alive")
    if isinstance(given, str):
        return re.fullmatch(r"[+-]?0+(\.0+)?(ns|us|µs|ms|s|m|h)?", given.strip()) is not None
    return given == 0 and given is not False
