"""Turns a chat into the input of the model's chat template, in OpenAI's form.

The engine adapts it to the form that the template reads: content as parts or text, arguments as
text or objects, tools or a description in words. Pure functions, any thread.
"""

from __future__ import annotations

import re
from typing import Any

from worker.api.chat.chat_fields import MAX_MESSAGES, MAX_TOOLS
from worker.api.chat.constrain.lark import MAX_CHARS_OF_ALL, pattern_of
from worker.api.chat.parse.conventions import conventions_of
from worker.api.chat.reasoning import reasoning_of, template_variables
from worker.api.chat.request import Chat, Content, Message, OneTool, Tool, ToolCall
from worker.api.http.faults import refusal
from worker.api.http.state import AppState
from worker.wire.work import ChatPrompt, Medium

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles of OpenAI's API."""


def chat_prompt(chat: Chat, state: AppState) -> ChatPrompt:
    """
    Raises:
        InvalidRequest: the model has no chat template, or it does not support this chat.
    """
    path, template = chat.path, state.served.chat_template
    if not state.served.has_chat_template:
        rest = "; send a raw prompt" if state.served.generates_text else " and generates no text"
        what = f"cannot be used, as this model has no chat template{rest}"
        raise refusal(path, "unsupported", what)
    if chat.tools or chat.tool_choice != "auto":
        _check_tools(chat)
    if len(chat.messages) > MAX_MESSAGES:
        what = f"must be at most {MAX_MESSAGES}; each tool result counts as one"
        raise refusal(path, "maxItems", what)
    for index, role in enumerate(message.role for message in chat.messages):
        if role in ROLES or not template:
            continue
        if not re.search(rf"""(["']){re.escape(role)}\1""", template):
            what = f"must be {', '.join(ROLES)} or another that the model's chat template names"
            raise refusal(f"{path}[{index}].role", "enum", what)
    if chat.continues:
        last = chat.messages[-1]
        if last.tool_calls:
            raise refusal(path, "conflict", "must not end with a call if the answer continues it")
        if last.role not in ("assistant", "user"):
            what = "must be assistant or user if the answer continues this message"
            raise refusal(f"{path}[{len(chat.messages) - 1}].role", "enum", what)
    return ChatPrompt(
        messages=tuple(map(_message, chat.messages)),
        tools=tuple(map(_tool, chat.tools)) if chat.tool_choice != "none" else (),
        add_generation_prompt=chat.opens_answer and not chat.continues,
        continue_final_message=bool(chat.continues),
        reasoning_marks=_marks_of_open_reasoning(chat, template) if chat.continues else None,
        template_kwargs=template_variables(chat, reasoning_of(chat, state), state),
        media=tuple(
            part
            for message in chat.messages
            for part in message.content or ()
            if isinstance(part, Medium)
        ),
        field=path,
    )


def _check_tools(chat: Chat) -> None:
    """
    Raises:
        InvalidRequest: there are too many tools, tools of different kinds or namespaces share a
            name, the tool to call does not exist, or the form of a text is invalid or too long.
    """
    if len(chat.tools) > MAX_TOOLS:
        what = f"must be at most {MAX_TOOLS}, including those of namespaces and messages"
        raise refusal("tools", "maxItems", what)
    choice, tools, n_chars = chat.tool_choice, dict[str, Tool](), 0
    for tool in chat.tools:
        other = tools.setdefault(tool.name, tool)
        if (tool.is_custom, tool.within) != (other.is_custom, other.within):
            what = f"must differ from {other.name_path}: the model knows both by one name"
            raise refusal(tool.name_path, "conflict", what)
        if (form := tool.form) is not None:
            n_chars += len(form.definition)
            if n_chars > MAX_CHARS_OF_ALL:
                what = f"and those before it must have at most {MAX_CHARS_OF_ALL} characters"
                raise refusal(f"{form.path}.definition", "maxLength", what)
            pattern_of(form)
    if choice in ("auto", "none"):
        return
    if not tools:
        raise refusal("tool_choice", "requires", "needs tools to choose from")
    if isinstance(choice, OneTool) and choice.name not in tools:
        raise refusal(choice.path, "enum", "must be the name of one of the tools")


def _marks_of_open_reasoning(chat: Chat, template: str) -> tuple[str, str] | None:
    """The marks of the reasoning that the answer continues, if it does and the template has any."""
    last, thinking = chat.messages[-1], conventions_of(template).thinking
    is_wanted = chat.continues == "reasoning_content" or (
        chat.continues is True and last.reasoning and not last.content
    )
    if not (is_wanted and last.role == "assistant" and re.search(thinking.template, template)):
        return None
    pads = (pad for pad in ("\n", r"\n") if thinking.begin + pad in template)
    return thinking.begin + thinking.pads[0] * any(pads), thinking.end


def content_joined(first: Content | None, second: Content | None) -> Content:
    """The content of two messages as one; a blank line separates texts that meet."""
    if not (first and second):
        return first or second or ()
    (*before, last), (begun, *others) = first, second
    if isinstance(last, str) and isinstance(begun, str):
        # One part, as many templates join the texts of parts without a separator.
        return (*before, f"{last}\n\n{begun}", *others)
    return (*first, *second)


def _message(message: Message) -> dict[str, Any]:
    content: Any
    match message.content:
        case None:
            content = None
        case ():
            content = ""
        case (str(content),):
            pass
        case parts:
            content = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}
                for part in parts
            ]
    return {"role": message.role, "content": content} | _without_none(
        name=message.name,
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning,
        tool_calls=list(map(_call, message.tool_calls)) or None,
    )


def _call(call: ToolCall) -> dict[str, Any]:
    # Clients may send no arguments for a function without parameters.
    function = {"name": call.name, "arguments": call.arguments or {}}
    return _without_none(id=call.id) | {"type": "function", "function": function}


def _tool(tool: Tool) -> dict[str, Any]:
    fields = {"description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": _without_none(name=tool.name, **fields)}


def _without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
