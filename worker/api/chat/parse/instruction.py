"""Describes functions in words to a model whose chat template takes no tools.

The form of the calls is the most widespread one. Calls in earlier messages, and their results,
become text in that form. Pure functions, any thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INSTRUCTION = """You may call functions to help with the request. They are, one JSON object a line:
{functions}

To call one, answer with nothing but
<tool_call>
{{"name": "the function's name", "arguments": {{its arguments as a JSON object}}}}
</tool_call>
and wait: the result comes in <tool_response></tool_response>. Otherwise answer in words."""

TemplateMessage = Mapping[str, Any]


def with_instruction(
    messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]], template: str
) -> tuple[TemplateMessage, ...]:
    """Add the functions to the system message; without a system role to the first message."""
    plain = _in_words(messages)
    if tools:
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        text = _INSTRUCTION.format(functions="\n".join(lines))
        if plain and plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}
        elif _takes_system(template) or not plain:
            plain.insert(0, {"role": "system", "content": text})
        else:
            plain[0] = {**plain[0], "content": f"{text}\n\n{plain[0]['content']}"}
    return tuple(plain)


def _takes_system(template: str) -> bool:
    return "system" in template and "System role not supported" not in template


def _in_words(messages: Sequence[TemplateMessage]) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = []
    answers_before = False
    for message in messages:
        if message["role"] in ("tool", "function"):
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if answers_before:  # the results of parallel calls make one turn
                plain[-1]["content"] += f"\n{text}"
            else:
                plain.append({"role": "user", "content": text})
            answers_before = True
            continue
        answers_before = False
        kept = {name: value for name, value in message.items() if name != "tool_calls"}
        if calls := message.get("tool_calls"):
            texts = [kept["content"], *map(_call_in_words, calls)]
            kept["content"] = "\n".join(text for text in texts if text)
        plain.append(kept)
    return plain


def _call_in_words(call: Mapping[str, Any]) -> str:
    function = call["function"]
    written = {"name": function["name"], "arguments": function.get("arguments") or {}}
    return f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>"
