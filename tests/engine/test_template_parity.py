"""The templates that ship in the pinned sdist render as transformers renders them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from builds import sdist
from builds.pins import pins
from tests.engine.chats import CHATS, SPECIAL, FixedDate, fingerprint
from worker.engine.text import chat_template
from worker.engine.text.chat_template import ChatTemplate
from worker.errors import InvalidRequest
from worker.wire.work import ChatPrompt

EXPECTED = json.loads((Path(__file__).parents[1] / "data/chat_templates.json").read_text())


@pytest.fixture(scope="module")
def templates() -> Path:
    return sdist.unpacked(pins()) / "vendor/llama.cpp/models/templates"


def test_all_of_them_are_compared(templates: Path) -> None:
    assert {path.name for path in templates.glob("*.jinja")} == set(EXPECTED)
    rendered = [text for chats in EXPECTED.values() for text in chats.values() if text is not None]
    assert len(rendered) > 250


@pytest.mark.parametrize("name", EXPECTED)
def test_renderings_equal_transformers(
    templates: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "datetime", FixedDate)
    template = ChatTemplate((templates / name).read_text(), SPECIAL)
    for chat_name, expected in EXPECTED[name].items():
        chat = CHATS[chat_name]
        prompt = ChatPrompt(
            messages=tuple(chat["messages"]),
            tools=tuple(chat.get("tools", ())),
            add_generation_prompt=chat.get("add_generation_prompt", True),
            template_kwargs=chat.get("template_kwargs"),
        )
        if expected is None:
            with pytest.raises(InvalidRequest):
                template.render(prompt)
        else:
            text = template.render(prompt)
            assert fingerprint(text) == expected, f"{chat_name}: {text!r}"
