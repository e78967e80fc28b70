"""What only one dialect does with its bodies and answers."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.support.pictures import picture
from worker.api.chat.request import ReasoningOptions, ToolCall
from worker.api.dialects.anthropic.schema import PromptBody, chat_of
from worker.api.dialects.ollama.schema import ChatBody
from worker.api.dialects.openai.routes import OPERATIONS
from worker.wire.work import Medium

PICTURE = {"type": "base64", "data": base64.b64encode(picture()).decode()}
CALL = {"type": "tool_use", "id": "1", "input": {}, "name": "look"}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "a"}


def test_a_fleets_model_lists_are_joined_into_one() -> None:
    [operation] = [each for each in OPERATIONS if (each.method, each.path) == ("GET", "/v1/models")]
    assert operation.joined is not None
    pages = [
        {"object": "list", "data": [{"id": id}], "has_more": False, "first_id": id, "last_id": id}
        for id in ("a", "b")
    ]
    whole = {"object": "list", "data": [{"id": "a"}, {"id": "b"}]}
    assert operation.joined(pages) == whole | {"has_more": False, "first_id": "a", "last_id": "b"}


def test_consecutive_messages_of_one_role_are_joined() -> None:
    """As at Anthropic; many templates accept nothing else."""
    parts = [{"type": "text", "text": "B"}, {"type": "image", "source": PICTURE}]
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    messages = [
        {"role": "user", "content": "A"},
        {"role": "user", "content": parts},
        {"role": "user", "content": "C"},
        {"role": "assistant", "content": [thinking, CALL]},
        {"role": "assistant", "content": "D"},
        {"role": "user", "content": [{"type": "text", "text": "E"}, RESULT]},
        {"role": "user", "content": [RESULT | {"tool_use_id": "2"}]},
        {"role": "user", "content": "F"},
    ]
    chat = chat_of(PromptBody.model_validate({"messages": messages}))
    question, called, *results, last = chat.messages
    before, picture, behind = question.content or ()
    assert (before, behind) == ("A\n\nB", "C") and isinstance(picture, Medium)
    assert called.content == ("D",) and called.reasoning == "Hm." and len(called.tool_calls) == 1
    assert [(each.role, each.tool_call_id) for each in results] == [("tool", "1"), ("tool", "2")]
    assert last.role == "user" and last.content == ("E\n\nF",)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("No star.", ("Error: No star.",)),
        ("error: no star", ("error: no star",)),
        ("", ("Error: ",)),
        ([{"type": "text", "text": "No star."}], ("Error: No star.",)),
        ([], ("Error: ",)),
    ],
)
def test_a_failed_tool_result_begins_with_error(content: Any, expected: Any) -> None:
    result = RESULT | {"is_error": True, "content": content}
    body = PromptBody.model_validate({"messages": [{"role": "user", "content": [result]}]})
    [message] = chat_of(body).messages
    assert message.content == expected


def test_a_chat_of_ollama_is_read_whole() -> None:
    call = {"function": {"name": "look", "arguments": {"where": "up"}}}
    body = ChatBody.model_validate(
        {
            "model": "m",
            "think": "high",
            "messages": [
                {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call]},
                {"role": "tool", "content": "A star.", "tool_name": "look"},
            ],
            "tools": [{"type": "function", "function": {"name": "look"}}],
        }
    )
    chat = body.chat(reasoning=body.reasoning)
    calling, result = chat.messages
    assert calling.reasoning == "Hm." and calling.tool_calls == (ToolCall("look", {"where": "up"}),)
    assert (result.role, result.name, result.content) == ("tool", "look", ("A star.",))
    assert [tool.name for tool in chat.tools] == ["look"]
    assert chat.reasoning == ReasoningOptions(effort="high", enabled=True)
    messages = [{"role": "user", "content": "A"}]
    silent = ChatBody.model_validate({"model": "m", "messages": messages, "think": False})
    assert silent.reasoning == ReasoningOptions(enabled=False)
