"""A chat as a prompt for the model's own template, in OpenAI's form.

Which form the template reads (parts or text, arguments as text or object, tools or words) is the
engine's knowledge.
"""

from __future__ import annotations

from typing import Any

from worker.api.chat.reasoning import template_variables
from worker.api.chat.request import Chat, Message, Part, Tool, ToolCall
from worker.api.http.faults import fault, invalid
from worker.api.http.state import AppState
from worker.wire.work import ChatPrompt


def chat_prompt(chat: Chat, state: AppState) -> ChatPrompt:
    """
    Raises:
        InvalidRequest: the model has no chat template.
    """
    if not state.served.has_chat_template:
        message = "messages need a chat template, and this model carries none; send a raw prompt"
        raise invalid([fault("messages", "unsupported", message)])
    return ChatPrompt(
        messages=tuple(map(_message, chat.messages)),
        tools=tuple(map(_tool, chat.tools)) if chat.tool_choice != "none" else (),
        add_generation_prompt=chat.opens_answer,
        continue_final_message=chat.continues,
        template_kwargs=template_variables(chat, state),
        media=tuple(
            part.medium
            for message in chat.messages
            if isinstance(message.content, tuple)
            for part in message.content
            if part.medium is not None
        ),
    )


def text_of(content: str | tuple[Part, ...] | None) -> str:
    """The text of a message's content; parts are joined by line ends, no content is ""."""
    return content if isinstance(content, str) else "\n".join(p.text for p in content or ())


def _message(message: Message) -> dict[str, Any]:
    content: Any = message.content
    if isinstance(content, tuple):
        content = [
            {"type": part.medium.kind}
            if part.medium is not None
            else {"type": "text", "text": part.text}
            for part in content
        ]
    given = {"name": message.name, "tool_call_id": message.tool_call_id}
    given["reasoning_content"] = message.reasoning
    present = {name: value for name, value in given.items() if value is not None}
    calls = {"tool_calls": [_call(call) for call in message.tool_calls]}
    flat = {"role": message.role, "content": content, **present}
    return flat | calls if message.tool_calls else flat


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
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
