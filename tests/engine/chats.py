"""Chats for every template, and how their renderings are compared: by hash, at a fixed date."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Any

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city <now> & later",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name"}},
            "required": ["city"],
        },
    },
}

CHATS: dict[str, dict[str, Any]] = {
    "one question": {"messages": [{"role": "user", "content": "What is <2> & 3? Ünï 🦊\n"}]},
    "conversation": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi there"},
            {"role": "user", "content": "How are you?"},
        ]
    },
    "no generation prompt": {
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi there"},
        ],
        "add_generation_prompt": False,
    },
    "tools": {
        "messages": [{"role": "user", "content": "The weather in Paris?"}],
        "tools": [WEATHER],
    },
    "switched": {
        "messages": [{"role": "user", "content": "Think"}],
        "template_kwargs": {"enable_thinking": False},
    },
}


class FixedDate(datetime):
    """Templates may ask for today's date."""

    @classmethod
    def now(cls, tz: Any = None) -> FixedDate:
        return cls(2026, 1, 2, 3, 4, 5)


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
