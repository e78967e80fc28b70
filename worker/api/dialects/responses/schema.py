"""The bodies of OpenAI's responses as pydantic models, and their conversion to requests.

Nothing is stored here, so a body must have the whole conversation. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Discriminator, Field, Tag, model_validator

from worker.api.chat.chat_fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    AllowedMode,
    ContentFields,
    TemplateFields,
    WordOr,
    content_of,
    with_allowed,
)
from worker.api.chat.field_types import (
    ANY_OBJECT,
    Stops,
    TextOrList,
    ToolName,
    TopLogprobs,
    ignoring,
    needed_by,
)
from worker.api.chat.fields import BudgetFields, ConstraintFields, OwnFields
from worker.api.chat.prompt import content_joined
from worker.api.chat.request import (
    INPUT,
    Chat,
    Format,
    Generate,
    JsonSchema,
    Message,
    OneTool,
    ReasoningOptions,
    Syntax,
    TextForm,
    Tool,
    ToolCall,
    custom_tool,
)
from worker.api.chat.sampling import SamplingFields
from worker.api.http.body import Flag, Integer, JsonObject, Many, OpenBody, Refused
from worker.api.http.faults import refusal, wrong
from worker.api.http.state import AppState


class Thought(OpenBody):
    type: str = ""
    text: str = ""


IgnoredItem = Literal["web_search_call", "tool_search_call", "mcp_list_tools"]
"""Items of OpenAI's own tools, which contain nothing that a model here could use."""
_IGNORED_ITEMS = frozenset(get_args(IgnoredItem))
_UPDATE = "configuration_update"
_SETTING_ITEMS = frozenset({"additional_tools", "tool_search_output", _UPDATE})
"""Items without words of the conversation: their tools and settings are added to the body's."""
_UNREADABLE = {
    "item_reference": "only refers to an item, and nothing is stored; send the item itself",
    "compaction": "holds a conversation that only OpenAI can read; begin a new one",
}


class CustomFormat(OpenBody):
    type: Literal["text", "grammar"] = "text"
    syntax: Syntax | None = None
    definition: str | None = None

    _has_syntax = needed_by({"grammar": "syntax"})
    _has_definition = needed_by({"grammar": "definition"})

    def form(self, path: str) -> TextForm | None:
        if self.type == "text" or self.syntax is None or self.definition is None:
            return None
        return TextForm(self.syntax, self.definition, path)


_OURS = ("function", "custom")
"""The types of tools that a client runs."""
_NAMED = dict.fromkeys((*_OURS, "namespace"), "name")
_OF_A_FUNCTION = ("type", "name", "description", "parameters", "strict")


class GroupedTool(OpenBody):
    type: str
    name: ToolName = ""
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="a JSON schema of the arguments")
    strict: Flag | None = None
    format: CustomFormat = Field(
        CustomFormat(),
        description="format of a custom tool's input; enforced for calls that are forced "
        "or beside a text format, else the input is whatever the model wrote",
    )

    _is_named = needed_by(_NAMED)

    def tool(self, path: str) -> Tool:
        """Convert the tool at the field `path`."""
        if self.type == "custom":
            form = self.format.form(f"{path}.format")
            return custom_tool(self.name, self.description, path, form)
        return Tool(self.name, f"{path}.parameters", self.description, self.parameters)


class ResponseTool(GroupedTool):
    tools: Many[GroupedTool] = Field(
        (), max_length=MAX_TOOLS, description="of a namespace: its functions and custom tools"
    )

    @property
    def ignored(self) -> Iterator[str]:
        """Types of the tools that OpenAI itself would run, which this worker does not have."""
        kinds = (self, *self.tools) if self.type != "namespace" else self.tools
        return (tool.type for tool in kinds if tool.type not in _OURS)

    def in_answer(self) -> dict[str, Any]:
        """The tool as an answer repeats it; a function has all of its fields there."""
        known = _OF_A_FUNCTION if self.type == "function" else ()
        return {**dict.fromkeys(known), **self.model_dump(exclude_unset=True)}

    def all(self, path: str) -> Iterator[Tool]:
        """This tool, or a namespace's tools, whose names begin with the namespace's."""
        if self.type in _OURS:
            yield self.tool(path)
        if self.type != "namespace":
            return
        about = self.description
        for index, each in enumerate(self.tools):
            if each.type not in _OURS:
                continue
            tool = each.tool(f"{path}.tools[{index}]")
            description = "\n\n".join(filter(None, (about, tool.description)))
            about = None  # only the first tool has the namespace's description
            name, within = qualified_name(tool.name, self.name), (self.name, tool.name)
            yield replace(tool, name=name, description=description or None, within=within)


def qualified_name(name: str, namespace: str | None) -> str:
    """The tool's name for the model, joined as Codex does for models without namespaces."""
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}" if namespace else name


class TextFormat(OpenBody):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: JsonObject | None = Field(None, validation_alias="schema", description="a JSON schema")
    strict: Flag | None = None

    _has_schema = needed_by({"json_schema": "schema_"})

    def formats(self, path: str) -> tuple[JsonSchema, ...]:
        """The forms that it asks for; `path` is this object's path in the request."""
        if self.type == "json_schema":
            return (JsonSchema(self.schema_, f"{path}.schema", self.strict is True),)
        return (JsonSchema(ANY_OBJECT, path),) if self.type == "json_object" else ()

    @property
    def in_answer(self) -> JsonObject:
        """The format as an answer repeats it; OpenAI's SDK requires all fields of a schema."""
        if self.type != "json_schema":
            return {"type": self.type}
        named = {"name": self.name or "", "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, **named}


class TextOptions(OpenBody):
    format: TextFormat | None = None
    verbosity: str | None = None


class Effort(OpenBody):
    effort: str | None = None


class InputItem(OpenBody):
    """A message, a call, its output, or the model's reasoning."""

    type: Literal[
        "message", "function_call", "function_call_output", "custom_tool_call",
        "custom_tool_call_output", "reasoning", "additional_tools", "tool_search_output",
        IgnoredItem, "item_reference", "compaction",
    ] = Field(
        "message",
        description=f"ignored are {', '.join(sorted(_IGNORED_ITEMS))}; item_reference is refused "
        "because nothing is stored, compaction because only OpenAI can read it",
    )  # fmt: skip
    id: str | None = Field(None, description="of an earlier answer's item; without effect here")
    status: str | None = Field(None, description="of an earlier answer's item; without effect here")
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: ContentFields | None = None
    name: ToolName = ""
    namespace: ToolName | None = Field(None, description="the namespace of a call's tool")
    call_id: str = Field("", description="connects a call with its output")
    arguments: str = ""
    input: str = Field("", description="of a custom_tool_call: its text")
    output: ContentFields = ""
    summary: Many[Thought] = ()
    tools: Many[ResponseTool] = Field(
        (), max_length=MAX_TOOLS, description="of additional_tools and tool_search_output"
    )

    _ignores = ignoring(_IGNORED_ITEMS)
    _is_named = needed_by({"function_call": "name", "custom_tool_call": "name"})

    @model_validator(mode="after")
    def _is_readable(self) -> Self:
        kind = "item_reference" if self.model_fields_set == {"id"} else self.type
        if what := _UNREADABLE.get(kind):
            raise wrong("unsupported", what)
        return self


class SettingsItem(OpenBody):
    """Settings that replace the body's."""

    type: Literal["configuration_update"]
    id: str | None = Field(None, description="no effect")
    reasoning: Effort = Effort()
    text: TextOptions = TextOptions()


def _kind_of_item(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "~settings" if kind == _UPDATE or isinstance(value, SettingsItem) else "~item"


AnyItem = Annotated[
    Annotated[InputItem, Tag("~item")] | Annotated[SettingsItem, Tag("~settings")],
    Discriminator(_kind_of_item),
]
Items = Annotated[Many[AnyItem], Field(min_length=1, max_length=MAX_MESSAGES)]


class AllowedTool(OpenBody):
    type: str
    name: ToolName = Field("", description="name of a tool, or of a namespace with all its tools")
    namespace: ToolName | None = None

    _is_named = needed_by(_NAMED)

    def names(self, tools: Iterable[Tool]) -> Iterator[str]:
        """The names, for the model, of the tools that it allows."""
        if self.type != "namespace":
            yield qualified_name(self.name, self.namespace)
            return
        for tool in tools:
            if tool.within is not None and tool.within[0] == self.name:
                yield tool.name


class ToolChoice(OpenBody):
    type: Literal["function", "custom", "allowed_tools"]
    name: ToolName | None = None
    namespace: ToolName | None = None
    mode: AllowedMode | None = None
    tools: Many[AllowedTool] = Field((), max_length=MAX_TOOLS)

    _has_choice = needed_by({"function": "name", "custom": "name", "allowed_tools": "mode"})


LOGPROBS = "message.output_text.logprobs"
MAX_INCLUDED = 64
Stored = Annotated[Any, Refused("nothing is stored: send the whole input")]


class ResponsesBody(TemplateFields, ConstraintFields, SamplingFields, OwnFields, BudgetFields):
    """A chat, and how to answer it."""

    input: TextOrList[Items]
    previous_input_messages: Annotated[Any, Refused("send them as input")] = None
    instructions: str | None = Field(None, description="a system message, before the input")
    max_output_tokens: Integer | None = Field(None, ge=1, description="the most tokens to generate")
    stop: Stops = ()
    tools: Many[ResponseTool] = Field((), max_length=MAX_TOOLS)
    tool_choice: WordOr[ToolChoice] | None = None
    parallel_tool_calls: Flag | None = None
    text: TextOptions = TextOptions()
    reasoning: Effort = Effort()
    include: Many[str] = Field(
        (), max_length=MAX_INCLUDED, description=f"only {LOGPROBS} is supported"
    )
    top_logprobs: TopLogprobs = Field(
        0, description="report log-probabilities of tokens and of this many alternatives; 0: none"
    )
    metadata: JsonObject = Field({}, max_length=16, description="repeated in the answer")
    previous_response_id: Stored = None
    conversation: Stored = None
    prompt: Stored = None

    @property
    def items(self) -> tuple[InputItem | SettingsItem, ...]:
        return () if isinstance(self.input, str) else self.input

    @property
    def settings(self) -> Iterator[tuple[str, SettingsItem | ResponsesBody]]:
        """The items with settings, the last one first, and then the body; each after the prefix of
        its fields' paths. The first that has a setting decides it."""
        for index, item in reversed(list(enumerate(self.items))):
            if isinstance(item, SettingsItem):
                yield f"input[{index}].", item
        yield "", self

    @property
    def effort(self) -> str | None:
        return next(filter(None, (each.reasoning.effort for _, each in self.settings)), None)

    @property
    def verbosity(self) -> str | None:
        return next(filter(None, (each.text.verbosity for _, each in self.settings)), None)

    @property
    def formats(self) -> tuple[Format, ...]:
        """The format of its `text`, before those of other servers' fields."""
        for prefix, each in self.settings:
            if (form := each.text.format) is not None:
                return (*form.formats(f"{prefix}text.format"), *super().formats)
        return super().formats

    @property
    def lists_of_tools(self) -> Iterator[tuple[str, Many[ResponseTool]]]:
        """The body's lists of tools, each with its path."""
        yield "tools", self.tools
        for index, item in enumerate(self.items):
            if isinstance(item, InputItem) and item.type in _SETTING_ITEMS:
                yield f"input[{index}].tools", item.tools

    @property
    def logprobs(self) -> int | None:
        return self.top_logprobs if self.top_logprobs or LOGPROBS in self.include else None


def read(body: ResponsesBody, state: AppState) -> Generate:
    """
    Raises:
        InvalidRequest: the body refers to something stored, or has nothing that a model can read.
    """
    return Generate(
        input=chat_of(body),
        sampling=body.sampling(state, body.logprobs),
        max_tokens=body.max_output_tokens,
        formats=body.formats,
        stop=body.stop,
        ignored=(
            *(
                f"tools.{kind}"
                for _, tools in body.lists_of_tools
                for tool in tools
                for kind in tool.ignored
            ),
            *(f"input.{kind}" for kind in sorted(_IGNORED_ITEMS & _kinds(body))),
            *(f"include.{name}" for name in body.include if name != LOGPROBS),
        ),
        **body.own("resp_"),
    )


def _kinds(body: ResponsesBody) -> set[str]:
    return {item.type for item in body.items}


def chat_of(body: ResponsesBody) -> Chat:
    """
    Raises:
        InvalidRequest: the body refers to something stored, or has nothing that a model can read.
    """
    if (kinds := _kinds(body)) and kinds <= _IGNORED_ITEMS | _SETTING_ITEMS:
        what = f"must have an item besides {' and '.join(sorted(kinds))}, which models cannot read"
        raise refusal("input", "minItems", what)
    variables = {"verbosity": body.verbosity} if body.verbosity else {}
    tools = tuple(_tools_of(body))
    chat = Chat(
        messages=tuple(_messages(body)),
        tools=tools,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning=ReasoningOptions(
            body.reasoning_budget, body.reasoning_budget_message, body.effort
        ),
        template_variables={**body.chat_template_kwargs, **variables},
        path="input",
    )
    choice = body.tool_choice
    if not isinstance(choice, ToolChoice):
        return chat if choice is None else replace(chat, tool_choice=choice)
    if choice.type != "allowed_tools":
        name = qualified_name(choice.name or "", choice.namespace)
        return replace(chat, tool_choice=OneTool(name, "tool_choice.name"))
    allowed = [
        (list(each.names(tools)), f"tool_choice.tools[{index}].name")
        for index, each in enumerate(choice.tools)
        if each.type in (*_OURS, "namespace")
    ]
    return with_allowed(chat, choice.mode or "auto", allowed)


def _tools_of(body: ResponsesBody) -> Iterator[Tool]:
    """The tools of the body. Items may repeat those that came before them, so a tool of an item
    replaces earlier ones of its name."""
    first, *later = [
        [each for index, tool in enumerate(tools) for each in tool.all(f"{path}[{index}]")]
        for path, tools in body.lists_of_tools
    ]
    named = {tool.name: tool for tools in later for tool in tools}
    yield from (tool for tool in first if tool.name not in named)
    yield from named.values()


def _messages(body: ResponsesBody) -> list[Message]:
    messages = [Message("system", (body.instructions,))] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, Message("user", content_of(body.input, "input"))]
    for index, item in enumerate(body.input):
        if isinstance(item, SettingsItem):
            continue
        content = content_of(item.content, f"input[{index}].content")
        turn = messages[-1] if messages and messages[-1].role == "assistant" else None
        match item.type:
            case "message" if item.role == "assistant":
                if turn is None or (turn.content is not None and not turn.tool_calls):
                    messages.append(Message("assistant", content or ()))
                else:  # even after a call, which templates want directly before its result
                    messages[-1] = replace(turn, content=content_joined(turn.content, content))
            case "message":
                messages.append(Message(item.role, content or ()))
            case "function_call" | "custom_tool_call":
                name = qualified_name(item.name, item.namespace)
                is_custom = item.type == "custom_tool_call"
                arguments = {INPUT: item.input} if is_custom else item.arguments
                call = ToolCall(name, arguments, item.call_id)
                if turn is None:
                    messages.append(Message("assistant", tool_calls=(call,)))
                else:
                    messages[-1] = replace(turn, tool_calls=(*turn.tool_calls, call))
            case "function_call_output" | "custom_tool_call_output":
                output = content_of(item.output, f"input[{index}].output")
                messages.append(Message("tool", output, tool_call_id=item.call_id))
            case "reasoning":
                # The full text, if this worker wrote it. Reasoning begins a new turn.
                text = "\n".join(part for part in content or () if isinstance(part, str))
                summary = "\n".join(thought.text for thought in item.summary)
                messages.append(Message("assistant", reasoning=text or summary))
    return messages
