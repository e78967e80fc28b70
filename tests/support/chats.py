"""Chats as clients send them, for every template; and the day on which they are rendered."""

from __future__ import annotations

import json
import lzma
from datetime import datetime
from typing import Any

from tests import DATA

SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
"""Those of the bundled model, with which llama-server is run."""
TEMPLATES = DATA / "templates"
PROMPTS = DATA / "prompts.json.xz"


def function(name: str, of: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name[4:]} of a {of} <now> & 'later'",
            "parameters": {
                "type": "object",
                "properties": {
                    of: {"type": "string", "description": "Its name"},
                    "days": {"type": "integer"},
                },
                "required": [of],
            },
        },
    }


def call(n: int, name: str, **arguments: Any) -> dict[str, Any]:
    """A call as clients send it, with an id that the strictest templates accept."""
    written = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call0000{n}",
        "type": "function",
        "function": {"name": name, "arguments": written},
    }


def calling(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def result(n: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{n}", "content": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


BRIEF = {"role": "system", "content": "Be brief."}
WEATHER = function("get_weather", "city")
TIME = function("get_time", "city")
QUESTION = user("The weather in Zürich?")
ONE_CALL = [QUESTION, calling(call(1, "get_weather", city="Zürich", days=2)), result(1, "<4> °C")]
TWO_CALLS = [
    user("Weather and time in Paris?"),
    calling(call(1, "get_weather", city="Paris"), call(2, "get_time", city="Paris")),
    result(1, "sunny"),
    result(2, '{"hour": 12}'),
]
PARTS = [{"type": "text", "text": "First."}, {"type": "text", "text": "Second?"}]

CHATS: dict[str, dict[str, Any]] = {
    "one question": {"messages": [user("What is <2> & 3? Ünï 🦊\n")]},
    "system": {"messages": [BRIEF, user("Hello")]},
    "conversation": {
        "messages": [BRIEF, user("Hello"), assistant("Hi there"), user("How are you?")]
    },
    "no generation prompt": {
        "messages": [user("Hello"), assistant("Hi there"), user("And?")],
        "add_generation_prompt": False,
    },
    "tools": {"messages": [QUESTION], "tools": [WEATHER]},
    "tools, system": {"messages": [BRIEF, QUESTION], "tools": [WEATHER, TIME]},
    "call, result": {"messages": ONE_CALL, "tools": [WEATHER]},
    "call, result, answer": {
        "messages": [*ONE_CALL, assistant("Four degrees."), user("Thanks. Tomorrow?")],
        "tools": [WEATHER],
    },
    "two calls, results": {"messages": TWO_CALLS, "tools": [WEATHER, TIME]},
    "two calls, system, answer": {
        "messages": [BRIEF, *TWO_CALLS, assistant("Sunny noon."), user("Thanks!")],
        "tools": [WEATHER, TIME],
    },
    "reasoning": {
        "messages": [
            user("2 + 2?"),
            assistant("4", reasoning_content="Two and two make four."),
            user("3 + 3?"),
        ]
    },
    "reasoning, call": {
        "messages": [
            QUESTION,
            calling(call(1, "get_weather", city="Zürich"), reasoning_content="I need the weather."),
            result(1, "4 °C"),
        ],
        "tools": [WEATHER],
    },
    "parts": {"messages": [user(PARTS)]},
    "parts, system": {"messages": [{**BRIEF, "content": PARTS}, user(PARTS)]},
    "developer": {"messages": [{**BRIEF, "role": "developer"}, user("Hello")]},
    "thinking off": {
        "messages": [user("Think")],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "thinking on": {
        "messages": [user("Think")],
        "chat_template_kwargs": {"enable_thinking": True},
    },
}


def recorded() -> dict[str, Any]:
    """The data of `make_prompt_data`: `day`, `llama-server` and `transformers`, the last two by
    template and chat; `None` stands for a refused chat."""
    data: dict[str, Any] = json.loads(lzma.decompress(PROMPTS.read_bytes()))
    return data


def fixed_date(day: str) -> type[datetime]:
    """A `datetime` whose `now` is noon of that day, for templates that ask for the date."""

    class Fixed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Fixed:
            return cls.fromisoformat(f"{day}T12:00:00")

    return Fixed
