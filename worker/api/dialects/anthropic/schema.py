"""Anthropic's bodies as pydantic models, and their conversion to requests. Any thread."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from worker.api.chat.chat_fields import MAX_MESSAGES, MAX_TOOLS, TemplateFields
from worker.api.chat.field_types import (
    ModelName,
    Stops,
    TextOr,
    TextOrMany,
    ToolName,
    ignoring,
    needed_by,
)
from worker.api.chat.fields import OwnFields
from worker.api.chat.media import medium_of, named_medium
from worker.api.chat.prompt import content_joined
from worker.api.chat.request import (
    Chat,
    Content,
    Generate,
    JsonSchema,
    Message,
    OneTool,
    ReasoningOptions,
    Tool,
    ToolCall,
)
from worker.api.chat.sampling import SamplingFields
from worker.api.http.body import Flag, Integer, JsonObject, Many, OpenBody
from worker.api.http.faults import refusal, wrong
from worker.api.http.state import AppState
from worker.wire.work import Medium


class PlainText(OpenBody):
    type: Literal["text"]
    text: str = ""


class Source(OpenBody):
    """A picture, as base64 or a URL; or a document, as text or content."""

    type: Literal["base64", "url", "text", "content"]
    media_type: str = ""
    data: str = ""
    url: str = ""
    content: TextOrMany[PlainText] = ""


IgnoredBlock = Literal[
    "server_tool_use", "web_search_tool_result", "tool_search_tool_result", "mcp_tool_listing",
    "fallback",
]  # fmt: skip
"""Blocks in which no model here can read anything: calls of Anthropic's own tools, encrypted
results of its web search, tools that it found or listed, and marks of a change of models."""
IGNORED_BLOCKS = frozenset(get_args(IgnoredBlock))


class TextBlock(OpenBody):
    type: Literal[
        "text", "image", "document", "search_result",
        "thinking", "redacted_thinking", "tool_use", "tool_result",
        "tool_reference", "tool_addition", "tool_removal", IgnoredBlock,
    ] = Field(description=f"ignored are {', '.join(sorted(IGNORED_BLOCKS))}")  # fmt: skip
    text: str = ""
    source: TextOr[Source] | None = Field(None, description="of a search_result: a string")
    title: str = ""
    context: str = Field("", description="of a document: notes that precede its text")
    tool_name: str = Field("", description="of a tool_reference: the text that replaces it")
    content: TextOrMany[PlainText] = Field("", description="of a search_result: its text")

    _ignores = ignoring(IGNORED_BLOCKS)
    _has_source = needed_by({"image": "source", "document": "source"})


TextContent = TextOrMany[TextBlock]


_SERVER_TOOL = re.compile(
    r"mcp_toolset|(web_search|web_fetch|code_execution|advisor|tool_search_tool_\w+)_\d{8}"
)
"""Types of the tools that Anthropic itself runs; most end with a date."""


class ToolFields(OpenBody):
    type: str = Field("custom", description="custom; tools that Anthropic itself runs are ignored")
    name: ToolName = ""
    description: str | None = None
    input_schema: JsonObject | None = Field(None, description="a JSON schema of the arguments")

    @field_validator("type")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value != "custom" and not _SERVER_TOOL.fullmatch(value):
            what = "must be custom, with an input_schema: other types need Anthropic's own models"
            raise wrong("unsupported", what)
        return value

    _is_named = needed_by({"custom": "name"})


RemoteTool = Literal["mcp_tool_reference", "mcp_toolset_reference"]
_REMOTE_CHANGES = frozenset(get_args(RemoteTool))
_IGNORED_KINDS = IGNORED_BLOCKS | _REMOTE_CHANGES


class ToolChange(OpenBody):
    """The tool that a block adds or removes."""

    type: Literal["tool_reference", "tool_definition", RemoteTool] = Field(
        description="those of MCP are ignored, like tools that Anthropic itself runs"
    )
    name: ToolName = ""
    definition: ToolFields | None = None

    _ignores = ignoring(_REMOTE_CHANGES)
    _is_named = needed_by({"tool_reference": "name", "tool_definition": "definition"})


class ContentBlock(TextBlock):
    thinking: str = ""
    signature: str = Field("", description="of a thinking block; without effect here")
    id: str = ""
    name: ToolName = ""
    input: JsonObject = Field(default_factory=dict)
    tool_use_id: str = ""
    content: TextContent = ""  # type: ignore[assignment]
    is_error: Flag = Field(
        False, description="the call failed: the model reads its result after 'Error: '"
    )
    tool: ToolChange | None = Field(None, description="of a tool_addition or tool_removal")

    _is_named = needed_by({"tool_use": "name"})
    _has_tool = needed_by({"tool_addition": "tool", "tool_removal": "tool"})


class TurnConfig(OpenBody):
    effort: str | None = None


class TurnMessage(OpenBody):
    role: Literal["user", "assistant", "system"]
    content: TextOrMany[ContentBlock] = Field("", description="optional for system only")
    output_config: TurnConfig = Field(
        TurnConfig(), description="for the answers to this turn of the user"
    )
    clear_at: Literal["next_user_message", "never"] = Field(
        "never", description="next_user_message: dropped if a message of the user follows"
    )

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.role != "system" and "content" not in self.model_fields_set:
            raise wrong("required", f"of role {self.role} needs content")
        return self

    @property
    def blocks(self) -> tuple[ContentBlock, ...]:
        return () if isinstance(self.content, str) else self.content

    @property
    def begins_turn(self) -> bool:
        """Whether it is the user's, without results of calls, with which the turn goes on."""
        return self.role == "user" and all(block.type != "tool_result" for block in self.blocks)


class ToolChoice(OpenBody):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: Flag = False

    _is_named = needed_by({"tool": "name"})


class Thinking(OpenBody):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = Field(
        description="between_tools counts as disabled: models here write no notes between calls"
    )
    budget_tokens: Integer | None = Field(None, ge=0, le=2**31 - 1)


class OutputFormat(OpenBody):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(validation_alias="schema", description="a JSON schema")


class OutputConfig(TurnConfig):
    format: OutputFormat | None = None


class PromptBody(TemplateFields):
    """A chat whose tokens are counted."""

    model: ModelName | None = None
    messages: Many[TurnMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: TextContent | None = None
    tools: Many[ToolFields] = Field((), max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = Field(
        None, description="older name of output_config.format; ignored if both are set"
    )
    thread: Any = Field(None, description="not supported: nothing is stored")

    @property
    def formats(self) -> tuple[JsonSchema, ...]:
        """The schema of each field that has one. The answer follows the first."""
        newer, older = self.output_config.format, self.output_format
        forms = (("output_config.format", newer), ("output_format", older))
        return tuple(JsonSchema(form.schema_, f"{path}.schema") for path, form in forms if form)

    @property
    def effort(self) -> str | None:
        for message in reversed(self.messages):
            if message.output_config.effort is not None:
                return message.output_config.effort
            if message.begins_turn:
                break
        return self.output_config.effort

    @property
    def reasoning(self) -> ReasoningOptions:
        effort, thinking = self.effort, self.thinking
        if thinking is None:
            return ReasoningOptions(effort=effort)
        return ReasoningOptions(
            thinking.budget_tokens, effort=effort, enabled=thinking.type in ("enabled", "adaptive")
        )


class MessagesBody(PromptBody, SamplingFields, OwnFields):
    """A chat, and how to answer it."""

    max_tokens: Integer = Field(ge=1, description="the most tokens to generate")
    stop_sequences: Stops = ()


def read(body: MessagesBody, state: AppState) -> Generate:
    """Raises as `chat_of`."""
    return Generate(
        input=chat_of(body),
        sampling=body.sampling(state),
        max_tokens=body.max_tokens,
        formats=body.formats,
        stop=body.stop_sequences,
        ignored=(
            *(f"tools.{tool.type}" for _, tool in _tools(body) if tool.type != "custom"),
            *(f"messages.{kind}" for kind in sorted(_IGNORED_KINDS & _kinds(body))),
        ),
        **body.own("msg_"),
    )


def _kinds(body: PromptBody) -> set[str]:
    """The types of all blocks in messages and in tool results, and of the tools they change."""
    found = set[str]()
    for message in body.messages:
        for block in message.blocks:
            found.add(block.type)
            found.update(each.type for each in block.content if not isinstance(each, str))
            if block.tool is not None:
                found.add(block.tool.type)
    return found


def _tools(body: PromptBody) -> Iterator[tuple[str, ToolFields]]:
    """The tools at the end of the conversation, whose messages may add and remove some, each with
    its path.

    Raises:
        InvalidRequest: a message refers to an unknown tool.
    """
    added: dict[str, tuple[str, ToolFields]] = {}
    known, removed = {tool.name for tool in body.tools}, set[str]()
    for index, message in enumerate(body.messages):
        for position, block in enumerate(message.blocks):
            path, change = f"messages[{index}].content[{position}].tool", block.tool
            if change is None or change.type in _REMOTE_CHANGES:
                continue
            name = change.name
            if change.definition is not None:
                name = change.definition.name
                added[name] = f"{path}.definition", change.definition
            elif name not in known and name not in added:
                raise refusal(f"{path}.name", "enum", "must be the name of one of the tools")
            (removed.add if block.type == "tool_removal" else removed.discard)(name)
    gone = added.keys() | removed
    own = ((f"tools[{index}]", tool) for index, tool in enumerate(body.tools))
    yield from ((path, tool) for path, tool in own if tool.name not in gone)
    yield from (pair for name, pair in added.items() if name not in removed)


def chat_of(body: PromptBody) -> Chat:
    """Convert the messages. If the last one is the assistant's, the answer continues it.

    Raises:
        InvalidRequest: the body continues a stored thread, or has a picture or document that is
            not supported.
    """
    if body.thread is not None:
        what = "is not honoured: nothing is stored; send the whole conversation without it"
        refused = refusal("thread", "unsupported", what)
        # With this code, Anthropic's tool runners do that themselves.
        refused.details["error_code"] = "thread_unsupported_request"
        raise refused
    content = _content(body.system or "", "system")
    system = [Message("system", content)] if content else []
    last = max((i for i, each in enumerate(body.messages) if each.role == "user"), default=-1)
    placed = (
        (f"messages[{index}].content", each)
        for index, each in enumerate(body.messages)
        if each.clear_at == "never" or index > last
    )
    turns = groupby(placed, key=lambda pair: pair[1].role)
    messages = (*system, *(flat for role, turn in turns for flat in _turn(role, turn)))
    if not messages:
        raise refusal("messages", "minItems", "must have a message with content")
    tools = tuple(
        Tool(tool.name, f"{path}.input_schema", tool.description, tool.input_schema)
        for path, tool in _tools(body)
        if tool.type == "custom"
    )
    continues, choice = body.messages[-1].role == "assistant", body.tool_choice
    return Chat(
        messages=messages,
        tools=tools,
        tool_choice="auto" if choice is None else _choice(choice),
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        continues=continues,
        reasoning=body.reasoning,
        template_variables=body.chat_template_kwargs,
    )


def _choice(choice: ToolChoice) -> Literal["auto", "none", "required"] | OneTool:
    match choice.type:
        case "tool":
            return OneTool(choice.name or "", "tool_choice.name")
        case "any":
            return "required"
        case "auto" | "none" as word:
            return word


def _turn(role: str, turn: Iterable[tuple[str, TurnMessage]]) -> Iterator[Message]:
    """Consecutive messages of one role, joined as in Anthropic's API, after their tool results.

    System messages stay separate, as in other dialects. So does a text before a message with calls:
    some templates write a message's text after its calls.
    """
    others: list[Message] = []
    for path, message in turn:
        for flat in _flat(message, path):
            if flat.role == "tool":
                yield flat
            elif others and role != "system" and not (flat.tool_calls and others[-1].content):
                others[-1] = _joined(others[-1], flat)
            else:
                others.append(flat)
    yield from others


def _joined(first: Message, second: Message) -> Message:
    """Two messages as one, with their texts as paragraphs."""
    thoughts = [each.reasoning for each in (first, second) if each.reasoning]
    return replace(
        first,
        content=content_joined(first.content, second.content),
        reasoning="\n".join(thoughts) or None,
        tool_calls=(*first.tool_calls, *second.tool_calls),
    )


def _flat(message: TurnMessage, path: str) -> Iterator[Message]:
    """A message for each tool result, then the rest of the message, if there is any."""
    blocks = message.blocks
    results = [(i, block) for i, block in enumerate(blocks) if block.type == "tool_result"]
    for index, block in results:
        content = _content(block.content, f"{path}[{index}].content")
        if block.is_error:
            content = _as_error(content)
        yield Message("tool", content, tool_call_id=block.tool_use_id)
    rest = Message(
        role=message.role,
        content=_content(message.content, path),
        reasoning="\n".join(block.thinking for block in blocks if block.thinking) or None,
        tool_calls=tuple(
            ToolCall(block.name, block.input, block.id)
            for block in blocks
            if block.type == "tool_use"
        ),
    )
    if rest.tool_calls or rest.content or not (results or message.role == "system"):
        yield rest


def _as_error(content: Content) -> Content:
    """Begin a failed call's result with "Error: ", because no template has a field for that."""
    text = content[0] if content and isinstance(content[0], str) else ""
    if text.lower().startswith("error"):
        return content
    return (f"Error: {text}", *content[bool(text) :])


_PARAGRAPHS = ("document", "search_result", "tool_reference")
"""Blocks that become a paragraph of text."""


def _content(content: str | Sequence[TextBlock], path: str) -> Content:
    """A text, or the texts and pictures of blocks; those of `_PARAGRAPHS` become paragraphs."""
    if isinstance(content, str):
        return (content,) if content else ()
    runs: list[list[str] | Medium] = []
    was_paragraph = False
    for index, block in enumerate(content):
        if block.type not in ("text", "image", *_PARAGRAPHS):
            continue
        part, is_paragraph = _part(block, f"{path}[{index}]"), block.type in _PARAGRAPHS
        last = runs[-1] if runs else None
        if isinstance(part, Medium):
            runs.append(part)
        elif isinstance(last, list) and (was_paragraph or is_paragraph):
            last.append(part)
        else:
            runs.append([part])
        was_paragraph = is_paragraph
    parts = ("\n\n".join(filter(None, run)) if isinstance(run, list) else run for run in runs)
    return tuple(part for part in parts if part)


def _part(block: TextBlock, path: str) -> str | Medium:
    if block.type == "text":
        return block.text
    if block.type == "tool_reference":  # the prompt describes all tools, even deferred ones
        return block.tool_name
    source, where = block.source, f"{path}.source"
    if block.type == "search_result":
        if isinstance(source, Source):
            raise refusal(where, "type", "of a search_result must be a string")
        text = _text(block.content, f"{path}.content")
        return _in_lines(block.title, source or "", text)
    if not isinstance(source, Source):
        raise refusal(where, "type", "must be an object")
    match block.type, source.type:
        case "image", "url":
            return named_medium("image", source.url, f"{where}.url")
        case "image", "base64":
            return medium_of("image", source.data, f"{where}.data")
        case "image", _:
            raise refusal(f"{where}.type", "unsupported", "of an image must be base64 or url")
        case _, "text":
            text = source.data
        case _, "content":
            text = _text(source.content, f"{where}.content")
        case _:
            what = "of a document must be text or content: PDFs are not supported"
            raise refusal(f"{where}.type", "unsupported", what)
    return _in_lines(block.title, block.context, text)


def _text(content: str | Sequence[PlainText | TextBlock], path: str) -> str:
    if isinstance(content, str):
        return content
    for index, block in enumerate(content):
        if block.type != "text":
            raise refusal(f"{path}[{index}].type", "enum", "must be text")
    return _in_lines(*(block.text for block in content))


def _in_lines(*texts: str) -> str:
    return "\n".join(filter(None, texts))
