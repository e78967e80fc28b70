"""Messages and tools in the one form that all dialects pass to the chat template.

The models here have OpenAI's form; the other dialects are translated into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, Protocol, TypeVar

import pydantic_core
from pydantic import AfterValidator, AliasChoices, BaseModel, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from worker.api.chat.parse.instruction import with_instruction
from worker.api.http.body import Flag, JsonObject, OpenBody, is_deep
from worker.api.http.faults import fault, invalid
from worker.api.http.state import AppState
from worker.wire.work import ChatPrompt

MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_CALLS = 256


def json_kind(value: object) -> str:
    """The branch of a union for a value of this JSON type."""
    if isinstance(value, str):
        return "~text"
    if isinstance(value, list | tuple):
        return "~list"
    return "~object" if isinstance(value, Mapping | BaseModel) else "~other"


ByKind = Discriminator(json_kind)
Text = Annotated[str, Tag("~text")]
Item = TypeVar("Item")
Many = Annotated[tuple[Item, ...], Field(fail_fast=True)]
TextOr = Annotated[Text | Annotated[Item, Tag("~object")], ByKind]
TextOrMany = Annotated[Text | Annotated[Many[Item], Tag("~list")], ByKind]


def _readable(kind: str) -> str:
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise PydanticCustomError("body.unsupported", "must be 'text': this model reads text only")
    return kind


class Part(OpenBody):
    type: Annotated[str, AfterValidator(_readable)]
    text: str = Field("", validation_alias=AliasChoices("text", "refusal"))


Content = TextOrMany[Part]


class HasText(Protocol):
    text: str


def text_of(content: str | Iterable[HasText] | None) -> str:
    """The text of a message's content; parts are joined by line ends, no content is ""."""
    return content if isinstance(content, str) else "\n".join(p.text for p in content or ())


class FunctionCall(OpenBody):
    name: str = Field(min_length=1, max_length=256)
    arguments: TextOr[JsonObject] = ""


class ToolCall(OpenBody):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(OpenBody):
    role: str = Field(min_length=1, max_length=64)
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Many[ToolCall] = Field((), max_length=MAX_CALLS)
    reasoning_content: str | None = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: one text, and calls with parsed arguments."""
        flat: dict[str, Any] = {"role": self.role, "content": text_of(self.content)}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                flat[name] = value
        if self.tool_calls:
            flat["tool_calls"] = [
                {
                    **({"id": call.id} if call.id is not None else {}),
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _parsed(call.function.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        return flat


class Function(OpenBody):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="a JSON schema")
    strict: Flag | None = Field(
        None,
        description="a forced call keeps the schema either way; one that the model makes by its "
        "own choice is as the model wrote it",
    )


class Tool(OpenBody):
    type: Literal["function"] = "function"
    function: Function

    def for_template(self) -> dict[str, Any]:
        function = self.function.model_dump(include={"name", "description", "parameters"})
        present = {name: value for name, value in function.items() if value is not None}
        return {"type": "function", "function": present}


class TemplateBody(OpenBody):
    """The input of a chat template; the whole body of `/apply-template`."""

    messages: Many[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: Many[Tool] = Field((), max_length=MAX_TOOLS)
    add_generation_prompt: Flag | None = Field(
        None, description="true, unless the last message goes on"
    )
    continue_final_message: Flag = Field(
        False, description="the answer goes on where the last message ends"
    )
    chat_template_kwargs: JsonObject | None = Field(
        None, max_length=64, description="variables of the template"
    )

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return self.chat_template_kwargs or {}


def chat_prompt(body: TemplateBody, state: AppState, *, tools: bool = True) -> ChatPrompt:
    """The chat as a prompt for the model's own template.

    Raises:
        InvalidRequest: the model has no chat template.
    """
    info = state.supervisor.info
    if info is not None and not info.model.has_chat_template:
        message = "messages need a chat template, and this model carries none; send a raw prompt"
        raise invalid([fault("messages", "unsupported", message)])
    if body.continue_final_message and body.add_generation_prompt:
        message = "add_generation_prompt must not be true where continue_final_message is"
        raise invalid([fault("add_generation_prompt", "conflict", message)])
    given = tuple(tool.for_template() for tool in body.tools) if tools else ()
    messages: tuple[Mapping[str, Any], ...]
    messages = tuple(message.for_template() for message in body.messages)
    if info is not None and not info.model.template_takes_tools:
        messages = with_instruction(messages, given, state.chat_template)
        given = ()
    defaults = {"enable_thinking": True, "date_string": datetime.now().strftime("%d %b %Y")}
    goes_on = body.continue_final_message
    return ChatPrompt(
        messages=messages,
        tools=given,
        add_generation_prompt=body.add_generation_prompt is not False and not goes_on,
        continue_final_message=goes_on,
        template_kwargs=defaults | body.template_kwargs,
    )


def _parsed(arguments: str | JsonObject) -> Any:
    """A call's arguments as JSON. Text that is not JSON, or too deeply nested, stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = pydantic_core.from_json(arguments, allow_inf_nan=False)
    except ValueError:
        return arguments
    return arguments if is_deep([value]) else value
