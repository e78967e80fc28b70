"""The text that llama.cpp's templates write for an assistant's message, cut out of a prompt."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.chats import SPECIAL
from worker.api.chat.parse.conventions import Conventions, conventions_of
from worker.engine.text.chat_template import ChatTemplate
from worker.errors import InvalidRequest
from worker.wire.work import ChatPrompt

FOLDER = Path(__file__).parents[2] / "data/templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
FUNCTION = "edit_file"
EDIT: Any = {
    "type": "function",
    "function": {
        "name": FUNCTION,
        "description": "Edit a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "text": {"type": "string"},
                "input": {"type": "string"},
                "lines": {"type": "array", "items": {}},
                "n": {"type": "number"},
                "force": {"type": "boolean"},
                "options": {"type": "object"},
            },
            "required": ["path"],
        },
    },
}
QUESTION = {"role": "user", "content": "Edit it."}
PLAIN = "Plain words"


class Written(NamedTuple):
    prompt: str
    """The prompt before the answer."""
    output: str
    """The template's text of the answer, without the end of its turn."""


@cache
def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


@cache
def compiled(name: str) -> ChatTemplate:
    return ChatTemplate(source(name), SPECIAL)


def conventions(name: str) -> Conventions:
    return conventions_of(source(name), takes_tools=compiled(name).takes_tools)


KINDS = list({conventions_of(source(name)): name for name in NAMES}.values())
"""A template for each form of answers."""


def _render(name: str, *messages: Any, asks: bool = False) -> str | None:
    try:
        return compiled(name).read(ChatPrompt(messages, (EDIT,), add_generation_prompt=asks)).text()
    except InvalidRequest:
        return None


@cache
def _end_of_turn(name: str) -> str:
    plain = _render(name, QUESTION, {"role": "assistant", "content": PLAIN}) or ""
    return plain.rpartition(PLAIN)[2]


def written(
    name: str, calls: list[Any], content: str | None = None, reasoning: str | None = None
) -> Written | None:
    """Return a template's text for calls with these arguments; `None` if it writes none."""
    answer: dict[str, Any] = {"role": "assistant", "content": content}
    answer["tool_calls"] = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": FUNCTION, "arguments": a}}
        for i, a in enumerate(calls)
    ]
    if reasoning is not None:
        answer["reasoning_content"] = reasoning
    prompt, whole = _render(name, QUESTION, asks=True), _render(name, QUESTION, answer)
    if prompt is None or whole is None:
        return None
    same = os.path.commonprefix([prompt, whole])
    if prompt != same and same.rfind("<") > same.rfind(">"):
        same = same[: same.rfind("<")]  # not within a tag
    output = whole[len(same) :].removesuffix(_end_of_turn(name))
    end = _end_of_turn(name).strip()
    if (len(calls) > 1 or content) and end and end in output[: output.rfind(FUNCTION)]:
        return None  # a turn for each call, or one for the words
    return Written(same, output) if FUNCTION in output else None
