"""OpenAI's own Python client, sync and async, against the real process."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
BRAZIL: Any = [{"role": "user", "content": "Give me the capital of Brazil as JSON."}]
HEDGEHOG: Any = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Show me the emoji for a hedgehog."},
]


@pytest.fixture
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (FRANCE, "The capital of France is Paris."),
        (HEDGEHOG, "Here it is: 🦔"),
        (BRAZIL, '{"country": "Brazil", "capital": "Brasília"}'),
    ],
)
def test_chat_is_right_whole_and_streamed(
    client: OpenAI, model: str, messages: Any, expected: str
) -> None:
    whole = client.chat.completions.create(model=model, messages=messages, temperature=0)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "stop" and whole.model == model
    usage = whole.usage
    assert usage and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == expected
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert not chunks[-1].choices and chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1]) and len({c.id for c in chunks}) == 1


def test_completions_stop_seed_and_default_length(client: OpenAI, model: str) -> None:
    first = client.completions.create(model=model, prompt="Once upon a time", seed=3)
    again = client.completions.create(model=model, prompt="Once upon a time", seed=3)
    assert first.choices[0].text == again.choices[0].text
    assert first.usage and first.usage.completion_tokens <= 16
    stopped = client.completions.create(
        model=model, prompt="Once upon a time", temperature=0, max_tokens=64, stop=" gentle"
    )
    assert stopped.choices[0].text == ", there was a"
    assert stopped.choices[0].finish_reason == "stop"


def test_several_prompts_and_choices(client: OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=["Once upon", "One day,"], n=2, max_tokens=12, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text != answer.choices[1].text
    chunks = client.chat.completions.create(
        model=model, messages=FRANCE, n=3, temperature=0, stream=True
    )
    texts = {0: "", 1: "", 2: ""}
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert set(texts.values()) == {"The capital of France is Paris."}


def test_logprobs_of_chat(client: OpenAI, model: str) -> None:
    whole = client.chat.completions.create(
        model=model, messages=HEDGEHOG, temperature=0, logprobs=True, top_logprobs=3
    )
    assert whole.choices[0].logprobs and whole.choices[0].logprobs.content and whole.usage
    entries = whole.choices[0].logprobs.content
    assert b"".join(bytes(e.bytes or []) for e in entries).decode() == "Here it is: 🦔"
    for entry in entries:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"


def test_logprobs_of_completions(client: OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt="Once upon a time", temperature=0, max_tokens=4, logprobs=2
    )
    choice = answer.choices[0]
    assert choice.logprobs and choice.logprobs.tokens and choice.logprobs.text_offset
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == [0, 1, 7, 11]
    assert choice.logprobs.top_logprobs and len(choice.logprobs.top_logprobs[0]) == 2
