"""Each chat has the same prompt as in llama-server or transformers, with every template.

If the two differ, transformers decides, because template authors use it. If transformers refuses,
or its callers would change the chat first, llama-server decides. Prompts that equal neither are in
`OWN`, with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import pytest

from tests.support.chats import CHATS, SPECIAL, TEMPLATES, fixed_date, recorded
from worker.engine.text import chat_template
from worker.engine.text.chat_template import ChatTemplate
from worker.errors import InvalidRequest
from worker.wire.work import ChatPrompt

RECORDED = recorded()
WITH_TOOLS = {name for name, chat in CHATS.items() if "tools" in chat}

IN_WORDS = "the template takes no tools: llama-server leaves them out, here words describe them"
AS_FUNCTIONS = "the template takes `functions`: llama-server leaves them out"
ONE_CALL = "the template loses or refuses a second call of a turn: here each call is a turn"
ALL_PARTS = "the template loses or prints the system's parts: here they are one text"
TWO_CALLS = {"two calls, results", "two calls, system, answer"}

OWN: dict[str, tuple[set[str], str]] = {
    **dict.fromkeys(
        (
            "GigaChat3-10B-A1.8B",
            "GigaChat3.1-10B-A1.8B",
            "meta-llama-Llama-3.1-8B-Instruct",
            "meta-llama-Llama-3.2-3B-Instruct",
            "meta-llama-Llama-3.3-70B-Instruct",
            "openai-gpt-oss-120b",
        ),
        (TWO_CALLS, ONE_CALL),
    ),
    **dict.fromkeys(
        (
            "Apriel-1.6-15b-Thinker-fixed",
            "MiniMax-M1",
            "Mistral-Small-3.2-24B-Instruct-2506",
            "google-gemma-4-31B-it",
            "google-gemma-4-31B-it-interleaved",
            "unsloth-Apriel-1.5",
            "unsloth-mistral-Devstral-Small-2507",
        ),
        ({"parts, system"}, ALL_PARTS),
    ),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": (WITH_TOOLS, IN_WORDS),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (WITH_TOOLS, IN_WORDS),
    "deepseek-ai-DeepSeek-V3.1": (WITH_TOOLS, IN_WORDS),
    "fireworks-ai-llama-3-firefunction-v2": (WITH_TOOLS, AS_FUNCTIONS),
    "google-gemma-2-2b-it": (WITH_TOOLS, IN_WORDS),
    "HuggingFaceTB-SmolLM3-3B": (WITH_TOOLS, IN_WORDS),
    "llama-cpp-rwkv-world": (WITH_TOOLS, IN_WORDS),
    "microsoft-Phi-3.5-mini-instruct": (WITH_TOOLS, IN_WORDS),
}


def prompt_of(chat: Mapping[str, Any], **variables: Any) -> ChatPrompt:
    return ChatPrompt(
        messages=tuple(chat["messages"]),
        tools=tuple(chat.get("tools", ())),
        add_generation_prompt=chat.get("add_generation_prompt", True),
        template_kwargs={**variables, **chat.get("chat_template_kwargs", {})},
    )


FORMS = {
    form
    for path in TEMPLATES.glob("*.jinja")
    for form in re.findall(r"strftime_now\(['\"](.+?)['\"]\)", path.read_text("utf-8"))
}


def rendered(template: ChatTemplate, prompt: ChatPrompt) -> str | None:
    """Render as on the day of the recording, which the rendering process does not know."""
    try:
        text = template.read(prompt).text()
    except InvalidRequest:
        return None
    now, then = datetime.now(), datetime.fromisoformat(RECORDED["day"])
    for form in FORMS:
        text = text.replace(now.strftime(form), then.strftime(form))
    return text


def judged(template: ChatTemplate, name: str, chat_name: str) -> str:
    """Return whose prompt ours equals."""
    chat = CHATS[chat_name]
    text = rendered(template, prompt_of(chat))
    expected = RECORDED["llama-server"][name][chat_name]
    if text == expected:
        return "llama-server"
    if text is not None and text in RECORDED["transformers"][name][chat_name]:
        return "transformers"
    # llama-server turns reasoning on, transformers leaves that to the template.
    thinking = rendered(template, prompt_of(chat, enable_thinking=True))
    return "llama-server, asked to think" if thinking == expected else "neither"


@pytest.fixture(autouse=True)
def the_day_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "datetime", fixed_date(RECORDED["day"]))


def test_all_templates_and_chats_are_recorded() -> None:
    names = {path.stem for path in TEMPLATES.glob("*.jinja")}
    for reference in ("llama-server", "transformers"):
        assert set(RECORDED[reference]) == names, "tools/reference/make_prompt_data.py records them"
        assert all(set(chats) == set(CHATS) for chats in RECORDED[reference].values())


@pytest.mark.parametrize("name", RECORDED["llama-server"])
def test_prompts_equal_the_reference(name: str) -> None:
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), SPECIAL)
    own = {chat for chat in CHATS if judged(template, name, chat) == "neither"}
    assert own == OWN.get(name, (set(), ""))[0]


@pytest.mark.parametrize("name", OWN)
def test_our_own_prompts_contain_everything(name: str) -> None:
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), SPECIAL)
    chats, reason = OWN[name]
    assert template.takes_tools == (reason is not IN_WORDS)
    for chat_name in chats:
        text = template.read(prompt_of(CHATS[chat_name])).text()
        if reason is ALL_PARTS:
            assert "First.\nSecond?" in text
            continue
        assert "get_weather" in text and "Its name" in text
        for message in CHATS[chat_name]["messages"]:
            if message["role"] == "tool":
                # Some templates write a result as JSON.
                content = message["content"]
                assert content in text or json.dumps(content) in text
