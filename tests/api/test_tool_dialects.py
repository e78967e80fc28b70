"""Calls as models write them: the templates of the pinned sdist write one, the parser reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from builds import sdist
from builds.pins import pins
from tests.api.answers import parse
from tests.engine.chats import SPECIAL
from worker.api.chat.parse.calls import ToolUse
from worker.engine.text.chat_template import ChatTemplate
from worker.errors import InvalidRequest
from worker.wire.work import ChatPrompt

EDIT: Any = {
    "type": "function",
    "function": {
        "name": "edit_file",
        "description": "Edit a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "text": {"type": "string"},
                "lines": {"type": "array", "items": {"type": "integer"}},
                "force": {"type": "boolean"},
                "options": {"type": "object"},
            },
            "required": ["path"],
        },
    },
}
ARGUMENTS = {
    "path": "a/b c.py",
    "text": 'def f(x):\n    return "<b>" + x  # ünï {1}',
    "lines": [1, 20],
    "force": True,
    "options": {"depth": 3, "mode": "fast"},
}
WRITES_NO_CALLS = {
    # These drop the calls of earlier answers,
    "LFM2-8B-A1B.jinja",
    "LFM2.5-Instruct.jinja",
    "ibm-granite-granite-3.3-2B-Instruct.jinja",
    # or want other variables than calls.
    "CohereForAI-c4ai-command-r-plus-tool_use.jinja",
}
IN_WORDS_ONLY = "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja"
"""It writes calls only without any content, not beside an empty one: words tell them instead, in a
form that the readers of its family do not know."""


@pytest.fixture(scope="module")
def templates() -> Path:
    return sdist.unpacked(pins()) / "vendor/llama.cpp/models/templates"


NAMES = sorted(
    p.name for p in (sdist.unpacked(pins()) / "vendor/llama.cpp/models/templates").glob("*.jinja")
)


def written(
    template: ChatTemplate, arguments: Any, call_id: str, content: str | None
) -> tuple[str, str] | None:
    """The prompt, and what the template writes for a call after it; `None` where it writes none."""
    question = {"role": "user", "content": "Edit it."}
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": "edit_file", "arguments": arguments},
    }
    answer = {"role": "assistant", "content": content, "tool_calls": [call]}

    def render(*messages: Any, ask: bool) -> str:
        return template.render(ChatPrompt(messages, (EDIT,), add_generation_prompt=ask))

    try:
        prompt, whole = render(question, ask=True), render(question, answer, ask=False)
    except InvalidRequest:
        return None
    same = os.path.commonprefix([prompt, whole])
    if prompt != same and same.rfind("<") > same.rfind(">"):
        same = same[: same.rfind("<")]  # not within a tag
    output = whole[len(same) :]
    return (same, output) if "edit_file" in output else None


def first_written(template: ChatTemplate) -> tuple[str, str] | None:
    for call_id in ("abcdefghi", "functions.edit_file:0"):
        for content in ("", None):
            for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
                found = written(template, arguments, call_id, content)
                if found is not None:
                    return found
    return None


@pytest.mark.parametrize("name", NAMES)
def test_what_a_template_writes_is_read_back(templates: Path, name: str) -> None:
    source = (templates / name).read_text()
    template = ChatTemplate(source, SPECIAL)
    found = first_written(template)
    assert (found is None) == (name in WRITES_NO_CALLS)
    if found is None:
        return
    prompt, output = found
    if name == IN_WORDS_ONLY:
        assert output.startswith("<tool_call>\n")
        return
    for size in (1, 7, len(output)):
        message = parse(output, source, ToolUse.of([EDIT]), size, prompt[-64:])
        assert message.named == [("edit_file", ARGUMENTS)], output
