"""Tool calls found in a model's text, whole and streamed, and what only looks like one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from worker.api.openai.tools import ToolCallParser, ToolUse, forced_functions

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "wait"}},
]
LOOK = '{"name": "look", "arguments": {"city": "Oslo"}}'


def parse(text: str, size: int, **body: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls of a text that comes in pieces of `size` characters."""
    use = ToolUse.of(TOOLS, body)
    assert use is not None
    parser = ToolCallParser(use)
    content = "".join(parser.feed(text[i : i + size]) for i in range(0, len(text), size))
    rest, calls = parser.finish()
    return content + rest, [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls
    ]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (f"<tool_call>\n{LOOK}\n</tool_call>", "", ["look"]),
        (f"Let me see. <tool_call>{LOOK}</tool_call>", "Let me see. ", ["look"]),
        (f"<tool_call>{LOOK}</tool_call><tool_call>{LOOK}</tool_call>", "", ["look", "look"]),
        (f"[TOOL_CALLS][{LOOK}]", "", ["look"]),
        (LOOK.replace("arguments", "parameters"), "", ["look"]),
        ('{"name": "wait"}', "", ["wait"]),
        ('{"name": "fly", "arguments": {}}', '{"name": "fly", "arguments": {}}', []),
        ("a < b and <tool_ but no call", "a < b and <tool_ but no call", []),
        ("<tool_call>{broken", "<tool_call>{broken", []),
        ("[" * 3000, "[" * 3000, []),
        ("", "", []),
    ],
)
def test_calls_are_found_wherever_the_pieces_are_cut(
    text: str, content: str, names: list[str], size: int
) -> None:
    found, calls = parse(text, size)
    assert found == content
    assert [name for name, _ in calls] == names
    assert all(arguments == {"city": "Oslo"} for name, arguments in calls if name == "look")


def test_one_call_at_most_where_asked() -> None:
    assert len(parse(f"[{LOOK}, {LOOK}]", 4, parallel_tool_calls=False)[1]) == 1


def test_a_forced_call_is_of_the_functions_it_may_be() -> None:
    where = "tools[{}].function.parameters"
    look = (where.format(0), "look", TOOLS[0]["function"]["parameters"])
    assert forced_functions(TOOLS, "look") == [look]
    assert forced_functions(TOOLS, "*") == [look, (where.format(1), "wait", None)]


def test_no_tools_is_no_tool_use() -> None:
    assert ToolUse.of([], {}) is None
