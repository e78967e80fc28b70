"""The bodies of OpenAI's responses as pydantic models, and the requests that they make.

Nothing is stored here, so a body has the whole conversation. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from worker.api.chat.chat_fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    AllowedMode,
    ContentFields,
    WordOr,
    content_of,
    with_allowed,
)
from worker.api.chat.custom import custom_tool
from worker.api.chat.field_types import ANY_OBJECT, TextOrList, ToolName, TopLogprobs, needed_by
from worker.api.chat.fields import OwnFields
from worker.api.chat.prompt import content_joined
from worker.api.chat.request import (
    INPUT,
    Chat,
    Generate,
    JsonSchema,
    Message,
    OneTool,
    ReasoningOptions,
    Syntax,
    TextForm,
    Tool,
    ToolCall,
)
from worker.api.chat.sampling import SamplingFields
from worker.api.http.body import Flag, Integer, JsonObject, Many, OpenBody
from worker.api.http.faults import fault, invalid, refusal, wrong
from worker.api.http.state import AppState


class Thought(OpenBody):
    type: str = ""
    text: str = ""


_IGNORED_ITEMS = frozenset({"web_search_call"})
"""What OpenAI's own tools did, of which an item tells nothing that a model could read."""
_UNREADABLE = {
    "item_reference": "only refers to an item, and nothing is stored; send the item itself",
    "compaction": "holds a conversation that only OpenAI can read; begin a new one",
}


class InputItem(OpenBody):
    """A message, a call, its output, or the model's reasoning."""

    type: Literal[
        "message", "function_call", "function_call_output", "custom_tool_call",
        "custom_tool_call_output", "reasoning", "web_search_call", "item_reference", "compaction",
    ] = Field(
        "message",
        description="an item_reference and a compaction are refused: nothing is stored, and only "
        "OpenAI can read the latter; a web_search_call is ignored",
    )  # fmt: skip
    id: str | None = Field(None, description="of an item of an earlier answer; nothing is stored")
    status: str | None = Field(None, description="of an earlier answer's item; says nothing here")
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: ContentFields | None = None
    name: ToolName = ""
    namespace: ToolName | None = Field(None, description="of a call's tool")
    call_id: str = ""
    arguments: str = ""
    input: str = Field("", description="of a custom_tool_call")
    output: ContentFields = ""
    summary: Many[Thought] = ()

    _is_named = needed_by({"function_call": "name", "custom_tool_call": "name"})

    @model_validator(mode="after")
    def _is_readable(self) -> Self:
        kind = "item_reference" if self.model_fields_set == {"id"} else self.type
        if what := _UNREADABLE.get(kind):
            raise wrong("unsupported", what)
        return self


Items = Annotated[Many[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]


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
    parameters: JsonObject | None = None
    strict: Flag | None = None
    format: CustomFormat = Field(
        CustomFormat(),
        description="of a custom tool's text; a forced call keeps it, one that the model makes by "
        "its own choice is as the model wrote it",
    )

    _is_named = needed_by(_NAMED)

    def tool(self, path: str) -> Tool:
        """The tool, whose field is `path`."""
        if self.type == "custom":
            form = self.format.form(f"{path}.format")
            return custom_tool(self.name, self.description, path, form)
        return Tool(self.name, f"{path}.parameters", self.description, self.parameters)


class ResponseTool(GroupedTool):
    tools: Many[GroupedTool] = Field(
        (), max_length=MAX_TOOLS, description="of a namespace: functions and custom tools"
    )

    @property
    def ignored(self) -> Iterator[str]:
        """What OpenAI itself would run; this worker has none of it."""
        kinds = (self, *self.tools) if self.type != "namespace" else self.tools
        return (tool.type for tool in kinds if tool.type not in _OURS)

    def told(self) -> dict[str, Any]:
        """In an answer, where a function has all of its fields."""
        known = _OF_A_FUNCTION if self.type == "function" else ()
        return {**dict.fromkeys(known), **self.model_dump(exclude_unset=True)}

    def all(self, path: str) -> Iterator[Tool]:
        """It, or the tools of the namespace that it is; their names begin with the namespace's."""
        if self.type in _OURS:
            yield self.tool(path)
        if self.type != "namespace":
            return
        about = self.description
        for index, each in enumerate(self.tools):
            if each.type not in _OURS:
                continue
            tool = each.tool(f"{path}.tools[{index}]")
            told = "\n\n".join(filter(None, (about, tool.description)))
            about = None  # with the first of them
            name, within = told_name(tool.name, self.name), (self.name, tool.name)
            yield replace(tool, name=name, description=told or None, within=within)


def told_name(name: str, namespace: str | None) -> str:
    """By which the model is told of a tool. Codex joins them so where it cannot keep them apart."""
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}" if namespace else name


class TextFormat(OpenBody):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: JsonObject | None = Field(None, validation_alias="schema")
    strict: Flag | None = None

    _has_schema = needed_by({"json_schema": "schema_"})

    @property
    def told(self) -> JsonObject:
        """In an answer: OpenAI's SDK wants all of a schema's fields."""
        if self.type != "json_schema":
            return {"type": self.type}
        named = {"name": self.name or "", "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, **named}


class TextOptions(OpenBody):
    format: TextFormat | None = None
    verbosity: str | None = None


class Effort(OpenBody):
    effort: str | None = None


class AllowedTool(OpenBody):
    type: str
    name: ToolName = Field("", description="of a tool, or of a namespace with all of its tools")
    namespace: ToolName | None = None

    _is_named = needed_by(_NAMED)

    def names(self, tools: Iterable[Tool]) -> Iterator[str]:
        """By which the model is told of what it allows."""
        if self.type != "namespace":
            yield told_name(self.name, self.namespace)
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


class ResponsesBody(SamplingFields, OwnFields):
    """`POST /v1/responses`."""

    input: TextOrList[Items]
    instructions: str | None = None
    max_output_tokens: Integer | None = Field(None, ge=1)
    tools: Many[ResponseTool] = Field((), max_length=MAX_TOOLS)
    tool_choice: WordOr[ToolChoice] | None = None
    parallel_tool_calls: Flag | None = None
    text: TextOptions = TextOptions()
    reasoning: Effort = Effort()
    include: Many[str] = Field(
        (), max_length=MAX_INCLUDED, description=f"{LOGPROBS}; nothing else is included"
    )
    top_logprobs: TopLogprobs = Field(
        0, description="so many alternatives of each token and its own log-probability; 0: neither"
    )
    metadata: JsonObject = Field({}, max_length=16, description="told again in the answer")
    previous_response_id: str | None = None
    conversation: Any = Field(None, description="not honoured; nothing is stored")
    prompt: Any = Field(None, description="not honoured; nothing is stored")

    @property
    def logprobs(self) -> int | None:
        return self.top_logprobs if self.top_logprobs or LOGPROBS in self.include else None


def read(body: ResponsesBody, state: AppState) -> Generate:
    """
    Raises:
        InvalidRequest: the body leaves something to what was stored, which is nothing.
    """
    return Generate(
        input=chat_of(body),
        sampling=body.sampling(state, body.logprobs),
        max_tokens=body.max_output_tokens,
        formats=_formats_of(body.text.format),
        ignored=(
            *(f"tools.{kind}" for tool in body.tools for kind in tool.ignored),
            *(f"input.{kind}" for kind in sorted(_IGNORED_ITEMS & _kinds(body))),
            *(f"include.{name}" for name in body.include if name != LOGPROBS),
        ),
        **body.own("resp_"),
    )


def _kinds(body: ResponsesBody) -> set[str]:
    return set() if isinstance(body.input, str) else {item.type for item in body.input}


def chat_of(body: ResponsesBody) -> Chat:
    """
    Raises:
        InvalidRequest: the body leaves something to what was stored, which is nothing, or it has
            nothing that a model reads.
    """
    stored = ("previous_response_id", "conversation", "prompt")
    if named := [name for name in stored if getattr(body, name) is not None]:
        what = "is not honoured: nothing is stored; send the whole input"
        raise invalid([fault(name, "unsupported", f"{name} {what}") for name in named])
    if (kinds := _kinds(body)) and kinds <= _IGNORED_ITEMS:
        what = f"must have an item besides {' and '.join(sorted(kinds))}: a model reads none of it"
        raise refusal("input", "minItems", what)
    verbosity = body.text.verbosity
    tools = [each for index, tool in enumerate(body.tools) for each in tool.all(f"tools[{index}]")]
    if len(tools) > MAX_TOOLS:
        what = f"must be at most {MAX_TOOLS}, those of namespaces counted one by one"
        raise refusal("tools", "maxItems", what)
    chat = Chat(
        messages=tuple(_messages(body)),
        tools=tuple(tools),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning=ReasoningOptions(effort=body.reasoning.effort),
        template_variables={} if verbosity is None else {"verbosity": verbosity},
        path="input",
    )
    choice = body.tool_choice
    if not isinstance(choice, ToolChoice):
        return chat if choice is None else replace(chat, tool_choice=choice)
    if choice.type != "allowed_tools":
        name = told_name(choice.name or "", choice.namespace)
        return replace(chat, tool_choice=OneTool(name, "tool_choice.name"))
    allowed = [
        (list(each.names(tools)), f"tool_choice.tools[{index}].name")
        for index, each in enumerate(choice.tools)
        if each.type in (*_OURS, "namespace")
    ]
    return with_allowed(chat, choice.mode or "auto", allowed)


def _messages(body: ResponsesBody) -> list[Message]:
    messages = [Message("system", (body.instructions,))] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, Message("user", content_of(body.input, "input"))]
    for index, item in enumerate(body.input):
        content = content_of(item.content, f"input[{index}].content")
        turn = messages[-1] if messages and messages[-1].role == "assistant" else None
        match item.type:
            case "message" if item.role == "assistant":
                if turn is None or (turn.content is not None and not turn.tool_calls):
                    messages.append(Message("assistant", content or ()))
                else:  # also behind a call: between it and its result a template takes nothing
                    messages[-1] = replace(turn, content=content_joined(turn.content, content))
            case "message":
                messages.append(Message(item.role, content or ()))
            case "function_call" | "custom_tool_call":
                name = told_name(item.name, item.namespace)
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
                # The full text, if this worker wrote it; a text of its own begins a turn.
                text = "\n".join(part for part in content or () if isinstance(part, str))
                summary = "\n".join(thought.text for thought in item.summary)
                messages.append(Message("assistant", reasoning=text or summary))
    return messages


def _formats_of(form: TextFormat | None) -> tuple[JsonSchema, ...]:
    match form:
        case TextFormat(type="json_schema"):
            return (JsonSchema(form.schema_, "text.format.schema", form.strict is True),)
        case TextFormat(type="json_object"):
            return (JsonSchema(ANY_OBJECT, "text.format"),)
        case _:
            return ()
