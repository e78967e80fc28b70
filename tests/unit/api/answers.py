"""What a parser makes of an output that comes in pieces, put together as a client does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.api.chat.delta import (
    Arguments,
    Call,
    Delta,
    Reasoning,
    Text,
)
from worker.api.chat.parse.answer import AnswerParser
from worker.api.chat.parse.calls import ToolUse
from worker.api.chat.parse.conventions import conventions_of


@dataclass
class Message:
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def named(self) -> list[tuple[str, Any]]:
        """Names and parsed arguments."""
        return [(call["name"], json.loads(call["arguments"])) for call in self.calls]


def use_of(
    tools: Iterable[Mapping[str, Any]], *, forced: bool = False, parallel: bool = True
) -> ToolUse:
    """The use of `tools`, which are in OpenAI's form."""
    functions = [tool["function"] for tool in tools]
    parameters = {function["name"]: function.get("parameters") for function in functions}
    return ToolUse(forced, parallel, parameters)


def message_of(deltas: Iterable[Delta]) -> Message:
    """Checks on the way that calls begin, grow and end in order."""
    message = Message()
    for delta in deltas:
        match delta:
            case Text(text):
                message.content += text
            case Reasoning(text):
                message.reasoning += text
            case Call(number, call_id, name):
                assert number == len(message.calls) and call_id
                message.calls.append({"id": call_id, "name": name, "arguments": ""})
            case Arguments(number, text):
                assert number == len(message.calls) - 1 and text
                message.calls[-1]["arguments"] += text
    return message


def parse(
    output: str,
    template: str | None,
    use: ToolUse | None,
    size: int,
    prompt_end: str = "",
    splits_reasoning: bool = True,
) -> Message:
    """The message of an output that comes `size` characters at a time."""
    parser = AnswerParser(
        conventions_of(template), use, prompt_end=prompt_end, splits_reasoning=splits_reasoning
    )
    deltas: list[Delta] = []
    for start in range(0, len(output), size):
        deltas += parser.feed(output[start : start + size])
    return message_of(deltas + parser.finish())
