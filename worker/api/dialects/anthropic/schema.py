"""Anthropic's bodies as pydantic models, translated into a chat in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from worker.api.chat.chat_fields import MAX_MESSAGES, MAX_TOOLS
from worker.api.chat.fields import MAX_STOPS, TextOrMany
from worker.api.dialects.openai.schema import ChatBody
from worker.api.http.body import Flag, Integer, JsonObject, Number, OpenBody


def _readable(kind: str) -> str:
    known = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
    if kind not in known:
        message = "must be 'text', 'thinking', 'tool_use' or 'tool_result': this model reads text"
        raise PydanticCustomError("body.unsupported", message)
    return kind


class TextBlock(OpenBody):
    type: Annotated[str, AfterValidator(_readable)]
    text: str = ""


TextContent = TextOrMany[TextBlock]


class ContentBlock(TextBlock):
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: JsonObject = Field(default_factory=dict)
    tool_use_id: str = ""
    content: TextContent = ""
    is_error: Flag = False


class TurnMessage(OpenBody):
    role: Literal["user", "assistant", "system"]
    content: TextOrMany[ContentBlock]


class ClientTool(OpenBody):
    type: Literal["custom"] = "custom"
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: JsonObject | None = None


class ToolChoice(OpenBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, max_length=256)
    disable_parallel_tool_use: Flag = False

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        if self.type == "tool" and not self.name:
            raise PydanticCustomError("body.required", "of type tool needs the name of a tool")
        return self


class Thinking(OpenBody):
    type: Literal["enabled", "disabled", "adaptive"]


class PromptBody(OpenBody):
    """`POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: tuple[TurnMessage, ...] = Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    system: TextContent | None = None
    tools: tuple[ClientTool, ...] = Field((), fail_fast=True, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesBody(PromptBody):
    """`POST /v1/messages`."""

    max_tokens: Integer = Field(ge=1)
    temperature: Number | None = Field(None, ge=0, le=2)
    top_p: Number | None = Field(None, ge=0, le=1)
    top_k: Integer | None = Field(None, ge=-1, le=2**31 - 1)
    stop_sequences: tuple[str, ...] = Field((), fail_fast=True, max_length=MAX_STOPS)
    stream: Flag = False


def text_of(content: str | tuple[TextBlock, ...] | None) -> str:
    return content if isinstance(content, str) else "\n".join(b.text for b in content or ())


def chat_of(body: PromptBody) -> ChatBody:
    """The same chat in OpenAI's form. The answer continues a last message of the assistant."""
    system = text_of(body.system)
    messages = [{"role": "system", "content": system}] if system else []
    messages += [flat for message in body.messages for flat in _flat(message)]
    chat: dict[str, Any] = {"model": body.model, "messages": messages}
    if body.messages[-1].role == "assistant":
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    if (choice := body.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        words = {"auto": "auto", "any": "required", "none": "none", "tool": named}
        chat["tool_choice"] = words[choice.type]
        if choice.disable_parallel_tool_use:
            chat["parallel_tool_calls"] = False
    if body.thinking is not None:
        chat["enable_thinking"] = body.thinking.type != "disabled"
    if isinstance(body, MessagesBody):
        chat |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences, "stream": body.stream}
        chat |= {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
    return ChatBody.model_validate(chat)


def _tool(tool: ClientTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _flat(message: TurnMessage) -> list[dict[str, Any]]:
    """A message in OpenAI's form, preceded by one message for each of its tool results."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    blocks = message.content
    results = [
        {"role": "tool", "tool_call_id": b.tool_use_id, "content": text_of(b.content)}
        for b in blocks
        if b.type == "tool_result"
    ]
    calls = [
        {"id": b.id, "type": "function", "function": {"name": b.name, "arguments": b.input}}
        for b in blocks
        if b.type == "tool_use"
    ]
    text = "\n".join(b.text for b in blocks if b.type == "text")
    thoughts = "\n".join(b.thinking for b in blocks if b.thinking)
    if results and not text and not calls:
        return results
    rest: dict[str, Any] = {"role": message.role, "content": text}
    if calls:
        rest["tool_calls"] = calls
    if thoughts:
        rest["reasoning_content"] = thoughts
    return [*results, rest]
