"""The bodies of OpenAI's responses as pydantic models, translated into chat completions.

Nothing is stored here, so a body has the whole conversation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from worker.api.chat.chat_fields import MAX_MESSAGES, MAX_TOOLS, ContentFields, content_of
from worker.api.chat.fields import ByKind, Text
from worker.api.chat.prompt import text_of
from worker.api.dialects.openai.schema import ChatBody, WordOr
from worker.api.http.body import Flag, Integer, JsonObject, Number, OpenBody
from worker.api.http.faults import fault, invalid


class Thought(OpenBody):
    type: str = ""
    text: str = ""


class Item(OpenBody):
    """A message, a call, its output, or the model's reasoning."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: ContentFields | None = None
    name: str = ""
    call_id: str = ""
    arguments: str = ""
    output: ContentFields = ""
    summary: tuple[Thought, ...] = Field((), fail_fast=True)


Items = Annotated[
    tuple[Item, ...], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), Tag("~list")
]


class FunctionTool(OpenBody):
    type: str
    name: str = ""
    description: str | None = None
    parameters: JsonObject | None = None
    strict: Flag | None = None


class TextFormat(OpenBody):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: JsonObject | None = Field(None, validation_alias="schema")
    strict: Flag | None = None


class TextOptions(OpenBody):
    format: TextFormat | None = None
    verbosity: str | None = None


class Effort(OpenBody):
    effort: str | None = None


class NamedChoice(OpenBody):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)


class ResponsesBody(OpenBody):
    """`POST /v1/responses`."""

    input: Annotated[Text | Items, ByKind]
    model: str | None = Field(None, max_length=1024)
    instructions: str | None = None
    max_output_tokens: Integer | None = Field(None, ge=1)
    temperature: Number | None = Field(None, ge=0, le=2)
    top_p: Number | None = Field(None, ge=0, le=1)
    stream: Flag = False
    tools: tuple[FunctionTool, ...] = Field((), fail_fast=True, max_length=MAX_TOOLS)
    tool_choice: WordOr[NamedChoice] | None = None
    parallel_tool_calls: Flag | None = None
    text: TextOptions = TextOptions()
    reasoning: Effort = Effort()
    previous_response_id: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None


def chat_of(body: ResponsesBody) -> ChatBody:
    """The same conversation in the form of chat completions."""
    if body.previous_response_id is not None:
        message = "previous_response_id is not honoured: nothing is stored; send the whole input"
        raise invalid([fault("previous_response_id", "unsupported", message)])
    chat: dict[str, Any] = {
        "messages": _messages(body),
        "max_tokens": body.max_output_tokens,
        "tools": [_tool(tool) for tool in body.tools if tool.type == "function"],
        "tool_choice": _choice(body.tool_choice),
        "reasoning_effort": body.reasoning.effort,
        "verbosity": body.text.verbosity,
        "response_format": _format(body.text.format),
    }
    names = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "user")
    chat |= {name: getattr(body, name) for name in (*names, "prompt_cache_key")}
    return ChatBody.model_validate(chat)


def hosted_tools(body: ResponsesBody) -> list[str]:
    """Tools that OpenAI itself would run; this worker has none."""
    return [f"tools.{tool.type}" for tool in body.tools if tool.type != "function"]


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = (
        (Item.model_validate({"content": body.input}),)
        if isinstance(body.input, str)
        else body.input
    )
    for index, item in enumerate(items):
        match item.type:
            case "message":
                role = "system" if item.role == "developer" and not messages else item.role
                _assistant(messages) if role == "assistant" else messages.append({"role": role})
                messages[-1]["content"] = text_of(content_of(item.content))
            case "function_call":
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = text_of(content_of(item.output))
                message = {"role": "tool", "tool_call_id": item.call_id, "content": output}
                messages.append(message)
            case "reasoning":
                # The full text, if this worker wrote it.
                full = item.content if isinstance(item.content, tuple) else ()
                thought = "\n".join(part.text for part in full or item.summary)
                messages.append({"role": "assistant", "reasoning_content": thought})
            case _:
                place = f"input[{index}].type"
                known = "'message', 'function_call', 'function_call_output' or 'reasoning'"
                raise invalid([fault(place, "enum", f"{place} must be {known}")])
    return messages


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that is being assembled, or a new one."""
    if not messages or messages[-1]["role"] != "assistant" or "content" in messages[-1]:
        messages.append({"role": "assistant"})
    return messages[-1]


def _tool(tool: FunctionTool) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: getattr(tool, name) for name in names}}


def _choice(choice: str | NamedChoice | None) -> object:
    if isinstance(choice, NamedChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.type != "json_schema":
        return None if form is None else {"type": form.type}
    if form.schema_ is None:
        message = "text.format.schema is required: an object"
        raise invalid([fault("text.format.schema", "required", message)])
    schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
    return {"type": "json_schema", "json_schema": schema}
