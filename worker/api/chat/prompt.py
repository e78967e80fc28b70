"""A chat as a prompt for the model's own template."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from worker.api.chat.parse.instruction import with_instruction
from worker.api.chat.request import Chat, Message, Part, Tool, ToolCall
from worker.api.http.body import parse_json
from worker.api.http.faults import fault, invalid
from worker.api.http.state import AppState
from worker.errors import InvalidRequest
from worker.wire.work import ChatPrompt


def chat_prompt(chat: Chat, state: AppState) -> ChatPrompt:
    """
    Raises:
        InvalidRequest: the model has no chat template.
    """
    info = state.supervisor.info
    if info is not None and not info.model.has_chat_template:
        message = "messages need a chat template, and this model carries none; send a raw prompt"
        raise invalid([fault("messages", "unsupported", message)])
    tools = tuple(map(_tool, chat.tools)) if chat.tool_choice != "none" else ()
    messages: tuple[Mapping[str, Any], ...] = tuple(map(_message, chat.messages))
    if info is not None and not info.model.template_takes_tools:
        messages = with_instruction(messages, tools, state.chat_template)
        tools = ()
    defaults = {"enable_thinking": True, "date_string": datetime.now().strftime("%d %b %Y")}
    return ChatPrompt(
        messages=messages,
        tools=tools,
        add_generation_prompt=chat.opens_answer,
        continue_final_message=chat.continues,
        template_kwargs=defaults | dict(chat.template_variables),
    )


def text_of(content: str | tuple[Part, ...] | None) -> str:
    """The text of a message's content; parts are joined by line ends, no content is ""."""
    return content if isinstance(content, str) else "\n".join(p.text for p in content or ())


def _message(message: Message) -> dict[str, Any]:
    """The message as chat templates expect it: one text, and calls with parsed arguments."""
    flat: dict[str, Any] = {"role": message.role, "content": text_of(message.content)}
    named = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning,
    }
    flat |= {name: value for name, value in named.items() if value is not None}
    if message.tool_calls:
        flat["tool_calls"] = [_call(call) for call in message.tool_calls]
    return flat


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _parsed(call.arguments)}
    id = {"id": call.id} if call.id is not None else {}
    return {**id, "type": "function", "function": function}


def _tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    present = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": present}


def _parsed(arguments: str | Mapping[str, Any]) -> Any:
    """A call's arguments as JSON. Text that is not JSON, or too much of it, stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_json(arguments.encode())
    except InvalidRequest:
        return arguments
