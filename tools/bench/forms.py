"""Answers whose text is partly predictable: a schema of ten keys, a forced call, an edited file, a
quoted document; and a chat, whose text is not. Each server runs with its own defaults.

A trained model writes answers of different lengths, so tokens a second are compared, not seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tools.bench.client import Request
from tools.bench.errors import BenchError
from tools.bench.loads import Load, Metrics, Prompt, RequestsOf, request_of, text_of
from tools.bench.model import INSTRUCT
from tools.bench.streams import TokenStream

KEYS = (
    "first_name last_name street_address city postal_code country phone_number email_address "
    "date_of_birth occupation"
).split()
PERSON = {
    "type": "object",
    "properties": {key: {"type": "string", "maxLength": 24} for key in KEYS},
    "required": KEYS,
    "additionalProperties": False,
}
FORECAST = {
    "type": "function",
    "function": {
        "name": "get_weather_forecast",
        "description": "The forecast of the weather for a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "maxLength": 20},
                "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
                "days_ahead": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["location", "temperature_unit", "days_ahead"],
            "additionalProperties": False,
        },
    },
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON},
        }
    },
    "call": {"tools": [FORECAST], "tool_choice": "required"},
}
"""The fields that constrain the answer, by the name of the load."""
TOPICS = ("bread", "the sky", "a lighthouse", "a long walk", "learning a language", "old clocks")


def _person(rng: random.Random, words: Sequence[str]) -> str:
    return f"Invent a person who likes{text_of(rng, words, 3)}, and describe them as JSON."


def _weather(rng: random.Random, words: Sequence[str]) -> str:
    place = rng.choice(("Rome", "Paris", "Oslo", "Lima", "Cairo"))
    return f"What will the weather be in {place} in {rng.randint(1, 9)} days?"


def _edit(rng: random.Random, words: Sequence[str]) -> str:
    """About 2,000 tokens of a file, of which one name changes."""
    functions = []
    for _ in range(50):
        one, two, three = rng.sample(words, 3)
        first = f"def {one}_{two}(value, more):\n    {three} = value * {rng.randint(1, 99)} + more"
        functions.append(f"{first}\n    return {three} - {rng.randint(1, 9)}\n")
    file = "\n".join(functions)
    task = "Write this file again, with `more` renamed to `rest`, and nothing else changed."
    return f"{task}\n```python\n{file}```"


def _quote(rng: random.Random, words: Sequence[str]) -> str:
    return f"Repeat this text word by word:{text_of(rng, words, 400)}"


def _chat(rng: random.Random, words: Sequence[str]) -> str:
    return f"Tell me about {rng.choice(TOPICS)}, and about{text_of(rng, words, 2)}."


def _asking(
    say: Callable[[random.Random, Sequence[str]], str], n_streams: int, n_out: int
) -> Callable[[random.Random, Sequence[str]], list[Prompt]]:
    def make(rng: random.Random, words: Sequence[str]) -> list[Prompt]:
        return [Prompt(say(rng, words), n_out) for _ in range(n_streams)]

    return make


def requests_with(form: dict[str, Any]) -> RequestsOf:
    def requests_of(
        prompts: list[Prompt], model_id: str, sampling: dict[str, Any]
    ) -> list[Request]:
        requests = []
        for prompt in prompts:
            body = {
                "model": model_id,
                "messages": [{"role": "user", "content": prompt.text}],
                "max_tokens": prompt.n_out,
                "stream": True,
                "stream_options": {"include_usage": True},
                **sampling,
                **form,
            }
            if not form:
                body["ignore_eos"] = True
            requests.append(request_of("/v1/chat/completions", body, prompt))
        return requests

    return requests_of


def read_form(streams: list[TokenStream], prompts: list[Prompt]) -> Metrics:
    """Tokens a second after the first events, whose time includes the prompt."""
    first = min(stream.token_times_s[0] for stream in streams)
    last = max(stream.token_times_s[-1] for stream in streams)
    counts = [stream.n_tokens for stream in streams]
    if None in counts or last <= first:
        raise BenchError("A server did not count its tokens, or sent all of them at once.")
    n_tokens = sum(count for count in counts if count is not None)
    return {"output_tokens_per_s": n_tokens / (last - first), "output_tokens": float(n_tokens)}


LOADS = {
    name: Load(
        name,
        None,
        _asking(say, n_streams, n_out),
        read_form,
        300,
        model=INSTRUCT,
        requests_of=requests_with(FORMS.get(name.rstrip("0123456789"), {})),
    )
    for name, say, n_streams, n_out in (
        ("schema1", _person, 1, 300),
        ("schema16", _person, 16, 300),
        ("call1", _weather, 1, 120),
        ("edit", _edit, 1, 400),
        ("quote", _quote, 1, 300),
        ("chat", _chat, 1, 200),
    )
}
