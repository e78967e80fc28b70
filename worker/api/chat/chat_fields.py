"""Messages and tools in the form of OpenAI and llama-server. Pure data, any thread."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field, Tag, field_validator

from worker.api.chat.field_types import (
    ByKind,
    FlagOrWord,
    TextOr,
    TextOrMany,
    ToolName,
    needed_by,
)
from worker.api.chat.fields import BudgetFields
from worker.api.chat.media import named_medium
from worker.api.chat.request import (
    INPUT,
    UNASKED,
    Chat,
    Content,
    Message,
    OneTool,
    ReasoningOptions,
    Syntax,
    TextForm,
    Tool,
    ToolCall,
    custom_tool,
)
from worker.api.http.body import Flag, Item, JsonObject, Many, OpenBody, Refused
from worker.api.http.faults import fault, invalid, refusal, wrong
from worker.settings import check_variables
from worker.wire.work import Medium

MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_CALLS = 256


ToolWord = Annotated[Literal["none", "auto", "required"], Tag("~text")]
WordOr = Annotated[ToolWord | Annotated[Item, Tag("~object")], ByKind]
PartKind = Literal[
    "text", "input_text", "output_text", "refusal",
    "image_url", "input_image", "input_audio", "audio_url", "reasoning_text",
]  # fmt: skip
"""`reasoning_text` is a part of a reasoning item of `/v1/responses`."""
_MEDIA = {
    "image_url": "image_url",
    "input_image": "image_url",
    "input_audio": "input_audio",
    "audio_url": "audio_url",
}
"""The field with the picture or sound of a part, by the part's type."""


class UrlFields(OpenBody):
    url: str


class SoundFields(OpenBody):
    data: str = Field(
        validation_alias=AliasChoices("data", "url"),
        description="base64, a data: URL, or an http(s) URL on a host of --allow-media-host",
    )
    format: str | None = None


class PartFields(OpenBody):
    type: PartKind
    text: str = Field("", validation_alias=AliasChoices("text", "refusal"))
    image_url: TextOr[UrlFields] | None = Field(
        None,
        description="base64, a data: URL, or an http(s) URL on a host of --allow-media-host; or "
        "an object with such a url",
    )
    input_audio: SoundFields | None = None
    audio_url: TextOr[UrlFields] | None = Field(None, description="like image_url, for a sound")
    annotations: Any = Field(None, description="part of an earlier answer; no effect")
    logprobs: Any = Field(None, description="part of an earlier answer; no effect")

    _has_medium = needed_by(_MEDIA)


ContentFields = TextOrMany[PartFields]


def content_of(content: str | tuple[PartFields, ...] | None, path: str) -> Content | None:
    """The content of a message; `path` is the path of its field.

    Raises:
        InvalidRequest: a picture or sound is not base64, or its URL is of no known form.
    """
    if content is None:
        return None
    if isinstance(content, str):
        return (content,) if content else ()
    parts = (_part_of(part, f"{path}[{index}]") for index, part in enumerate(content))
    return tuple(part for part in parts if part)


def _part_of(part: PartFields, path: str) -> str | Medium:
    if (field := _MEDIA.get(part.type)) is None:
        return part.text
    medium, path = getattr(part, field), f"{path}.{field}"
    match medium:
        case SoundFields():
            medium, path = medium.data, f"{path}.data"
        case UrlFields():
            medium, path = medium.url, f"{path}.url"
    return named_medium("image" if field == "image_url" else "audio", medium, path)


class FunctionName(OpenBody):
    name: ToolName = Field(min_length=1)


class CalledFunctionFields(FunctionName):
    arguments: TextOr[JsonObject] = ""
    index: Any = Field(None, description="no effect: the calls' order counts")


class CalledCustomFields(FunctionName):
    input: str = ""


ToolKind = Literal["function", "custom"]


class OfKind(OpenBody):
    """A tool, a call or a choice, with its details in the field that has the name of its type."""

    type: str

    _has_details = needed_by({kind: kind for kind in ("function", "custom", "allowed_tools")})

    @property
    def details(self) -> Any:
        return getattr(self, self.type)


class ToolCallFields(OfKind):
    id: str | None = None
    type: ToolKind = "function"
    function: CalledFunctionFields | None = None
    custom: CalledCustomFields | None = None

    @property
    def call(self) -> ToolCall:
        called = self.details
        arguments = {INPUT: called.input} if self.type == "custom" else called.arguments
        return ToolCall(called.name, arguments, self.id)


class MessageFields(OpenBody):
    role: str = Field(min_length=1, max_length=64)
    content: ContentFields | None = Field(None, validation_alias=AliasChoices("content", "refusal"))
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Many[ToolCallFields] = Field((), max_length=MAX_CALLS)
    function_call: Annotated[Any, Refused("send it in tool_calls")] = None
    reasoning_content: str | None = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )

    def message(self, path: str) -> Message:
        """The message; `path` is its path in the request. Raises like `content_of`."""
        return Message(
            role=self.role,
            content=content_of(self.content, f"{path}.content"),
            reasoning=self.reasoning_content,
            tool_calls=tuple(call.call for call in self.tool_calls),
            tool_call_id=self.tool_call_id,
            name=self.name,
        )


class FunctionFields(FunctionName):
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="a JSON schema")
    strict: Flag | None = Field(
        None,
        description="no effect: forced calls follow the schema anyway, and other calls are as the "
        "model wrote them",
    )


class GrammarFields(OpenBody):
    syntax: Syntax
    definition: str


class CustomFormat(OpenBody):
    type: Literal["text", "grammar"] = "text"
    grammar: GrammarFields | None = None

    _has_grammar = needed_by({"grammar": "grammar"})

    def form(self, path: str) -> TextForm | None:
        """The form of the text, `None` for any; `path` is this object's path in the request."""
        if self.type == "text" or (grammar := self.grammar) is None:
            return None
        return TextForm(grammar.syntax, grammar.definition, f"{path}.grammar")


class CustomFields(FunctionName):
    description: str | None = None
    format: CustomFormat = Field(
        CustomFormat(),
        description="format of the tool's input; enforced for calls that are forced or beside a "
        "response format, else the input is whatever the model wrote",
    )


class ToolFields(OfKind):
    type: ToolKind = "function"
    function: FunctionFields | None = None
    custom: CustomFields | None = Field(None, description="a tool that takes one text")

    def tool(self, path: str) -> Tool:
        """The tool; `path` is this object's path in the request."""
        own, path = self.details, f"{path}.{self.type}"
        if self.type == "custom":
            form = own.format.form(f"{path}.format")
            return custom_tool(own.name, own.description, path, form)
        return Tool(own.name, f"{path}.parameters", own.description, own.parameters)


AllowedMode = Literal["auto", "required"]


class AllowedTool(OfKind):
    type: ToolKind = "function"
    function: FunctionName | None = None
    custom: FunctionName | None = None


class AllowedTools(OpenBody):
    mode: AllowedMode
    tools: Many[AllowedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class ToolChoice(OfKind):
    type: Literal[ToolKind, "allowed_tools"] = "function"
    function: FunctionName | None = None
    custom: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


def with_allowed(
    chat: Chat, mode: AllowedMode, allowed: Sequence[tuple[Collection[str], str]]
) -> Chat:
    """The chat with only its allowed tools: each entry of `allowed` has the names that it allows,
    and its path. The model does not see the other tools, which it may not call.

    Raises:
        InvalidRequest: an entry names none of the tools.
    """
    offered = {tool.name for tool in chat.tools}
    if unknown := [path for names, path in allowed if offered.isdisjoint(names)]:
        what = "must be the name of one of the tools"
        raise invalid([fault(path, "enum", f"{path} {what}") for path in unknown])
    allowed_names = set(chain.from_iterable(names for names, _ in allowed))
    tools = tuple(tool for tool in chat.tools if tool.name in allowed_names)
    return replace(chat, tools=tools, tool_choice=mode)


class TemplateFields(OpenBody):
    """Variables of the chat template."""

    chat_template_kwargs: JsonObject = Field(
        {}, max_length=64, description="variables for the chat template"
    )
    chat_template: Annotated[Any, Refused("start the worker with --chat-template")] = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _switches(cls, variables: JsonObject) -> JsonObject:
        try:
            return check_variables(variables)
        except ValueError as error:
            raise wrong("type", str(error)) from None


class ChatFields(TemplateFields):
    """The input of a chat template."""

    messages: Many[MessageFields] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: Many[ToolFields] = Field((), max_length=MAX_TOOLS)
    documents: Annotated[
        Any,
        Refused("put them into a message, or into chat_template_kwargs if the template reads them"),
    ] = None
    add_generation_prompt: Flag | None = Field(
        None,
        description="whether the prompt opens an answer; default: yes, unless one is continued",
    )
    continue_final_message: FlagOrWord[Literal["content", "reasoning_content"]] = Field(
        False,
        description="continue the last message: content or reasoning_content, or with true, its "
        "text, or else its reasoning",
    )
    goes_on: ClassVar[bool] = False
    """Whether this dialect continues a last message of the assistant without being asked to."""

    def chat(
        self,
        reasoning: ReasoningOptions = UNASKED,
        variables: Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
    ) -> Chat:
        """The chat; `variables` are those of the template that fields set, and override
        `chat_template_kwargs`.

        Raises:
            InvalidRequest: two fields contradict each other.
        """
        last = self.messages[-1]
        continues = self.continue_final_message or (
            self.goes_on and last.role == "assistant" and not last.tool_calls
        )
        if self.continue_final_message and self.add_generation_prompt:
            what = "must not be true if continue_final_message is set"
            raise refusal("add_generation_prompt", "conflict", what)
        return Chat(
            messages=tuple(m.message(f"messages[{i}]") for i, m in enumerate(self.messages)),
            tools=tuple(tool.tool(f"tools[{i}]") for i, tool in enumerate(self.tools)),
            parallel_tool_calls=parallel_tool_calls,
            opens_answer=self.add_generation_prompt is not False,
            continues=continues,
            reasoning=reasoning,
            template_variables={**self.chat_template_kwargs, **(variables or {})},
        )


class ReasoningChatFields(ChatFields, BudgetFields):
    """A chat, and how the model is to reason and to call tools: the body of `/apply-template`."""

    tool_choice: WordOr[ToolChoice] | None = None
    parallel_tool_calls: Flag | None = Field(
        None,
        description="false: at most one call; true: several even if tool_choice requires one",
    )
    reasoning_format: Literal["none", "auto", "deepseek"] | None = Field(
        None, description="none: keep reasoning in content; else move it to reasoning_content"
    )
    reasoning_effort: str | None = Field(
        None,
        description="none, low, medium, high or another word that the model's template knows; "
        "sets a reasoning budget if the template knows no efforts",
    )
    verbosity: str | None = Field(None, description="passed to the chat template")
    enable_thinking: Flag | None = Field(None, description="false: the model does not reason")

    def reasoning_chat(self) -> Chat:
        """The whole chat.

        Raises:
            InvalidRequest: as from `chat`, or an allowed tool is not among the tools.
        """
        form = self.reasoning_format
        reasoning = ReasoningOptions(
            budget=self.reasoning_budget,
            message=self.reasoning_budget_message,
            effort=self.reasoning_effort,
            enabled=self.enable_thinking,
            splits=None if form is None else form != "none",
        )
        variables = None if self.verbosity is None else {"verbosity": self.verbosity}
        chat = self.chat(reasoning, variables, self.parallel_tool_calls)
        choice = self.tool_choice
        if not isinstance(choice, ToolChoice):
            return chat if choice is None else replace(chat, tool_choice=choice)
        chosen, path = choice.details, f"tool_choice.{choice.type}"
        if not isinstance(chosen, AllowedTools):
            return replace(chat, tool_choice=OneTool(chosen.name, f"{path}.name"))
        allowed = [
            ([each.details.name], f"{path}.tools[{index}].{each.type}.name")
            for index, each in enumerate(chosen.tools)
        ]
        return with_allowed(chat, chosen.mode, allowed)
