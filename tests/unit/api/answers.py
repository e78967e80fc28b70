"""A parser's deltas for an output that comes in pieces, assembled like in a client."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from worker.api.chat.delta import Arguments, Call, Delta, Reasoning, Text
from worker.api.chat.parse.calls import ToolUse
from worker.api.chat.parse.conventions import conventions_of
from worker.api.chat.parse.parser import AnswerParser
from worker.api.chat.request import Tool


@dataclass
class Message:
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def without_ids(self) -> Message:
        return Message(self.content, self.reasoning, [call | {"id": ""} for call in self.calls])

    @property
    def named(self) -> list[tuple[str, Any]]:
        """Return the calls as names and parsed arguments."""
        return [(call["name"], json.loads(call["arguments"])) for call in self.calls]


def use_of(
    tools: Iterable[Mapping[str, Any]],
    *,
    forced: bool = False,
    parallel: bool = True,
    custom: str = "",
) -> ToolUse:
    """The use of `tools`, in OpenAI's format; `custom` is the name of the only custom one."""
    offered = {}
    for name, schema in ((t["function"]["name"], t["function"].get("parameters")) for t in tools):
        offered[name] = Tool(name, "t", parameters=schema, is_custom=name == custom)
    return ToolUse(forced, parallel, offered, is_json=forced)


def message_of(deltas: Iterable[Delta]) -> Message:
    """Assemble the message; checks that calls begin, grow and end in order."""
    message, field_name = Message(), ""
    for delta in deltas:
        match delta:
            case Text(text):
                message.content += text
            case Reasoning(text):
                message.reasoning += text
            case Call(number, call_id, name, is_custom):
                assert number == len(message.calls) and call_id
                field_name = "input" if is_custom else "arguments"
                message.calls.append({"id": call_id, "name": name, field_name: ""})
            case Arguments(number, text):
                assert number == len(message.calls) - 1 and (text or field_name == "input")
                message.calls[-1][field_name] += text
    return message


def deltas_of(parser: AnswerParser, output: str, lengths: Sequence[int] = ()) -> list[Delta]:
    """Return the deltas of an output in pieces of these lengths, repeatedly; without any, whole."""
    deltas, at = list[Delta](), 0
    for length in cycle(lengths or (len(output),)):
        if at >= len(output):
            return deltas + parser.finish()
        deltas += parser.feed(output[at : at + length])
        at += length
    raise AssertionError("there is always another length")


def parse(
    output: str,
    template: str | None,
    use: ToolUse | None,
    prompt_end: str = "",
    *,
    splits_reasoning: bool = True,
    lengths: Iterable[int] = (1, 2, 5, 13, 1000),
) -> Message:
    """Return the message of an output, which must be the same in pieces of each length."""
    messages = []
    for length in lengths:
        parser = AnswerParser(
            conventions_of(template), use, prompt_end, splits_reasoning=splits_reasoning
        )
        messages.append(message_of(deltas_of(parser, output, [length])))
    first, *others = messages
    for other in others:
        assert other.without_ids == first.without_ids
    return first
