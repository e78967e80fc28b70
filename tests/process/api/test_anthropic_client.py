"""Anthropic's own Python client, sync and async, against the real process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic

from tests.support.worker import WorkerProcess

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
# The client no longer has a temperature, but passes on unknown fields.
REQUEST: Any = {
    "model": "any",
    "messages": FRANCE,
    "max_tokens": 64,
    "extra_body": {"temperature": 0},
}
ANSWER = "The capital of France is Paris."
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[Anthropic]:
    with Anthropic(base_url=worker.base_url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: Anthropic, **fields: Any) -> Any:
    return client.messages.create(**(REQUEST | fields))


def test_a_message_is_right_whole_and_streamed(client: Anthropic) -> None:
    whole = ask(client)
    assert [block.text for block in whole.content] == [ANSWER]
    assert whole.stop_reason == "end_turn" and whole.role == "assistant"
    with client.messages.stream(**REQUEST) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert final.usage.output_tokens == whole.usage.output_tokens
    count = client.messages.count_tokens(model="any", messages=FRANCE).input_tokens
    for usage in (whole.usage, final.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count


def test_answers_and_errors_have_the_request_id(client: Anthropic) -> None:
    named = {"extra_headers": {"x-request-id": "r-1"}}
    assert ask(client, max_tokens=1, **named)._request_id == "r-1"
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(client, max_tokens=0, **named)
    assert refused.value.request_id == "r-1"


@pytest.mark.parametrize("kind", [{"type": "create"}, {"type": "continue"}], ids=str)
def test_a_thread_is_refused_so_that_the_client_sends_all(client: Anthropic, kind: Any) -> None:
    """Its tool runner uses threads by default, and then sends only the result of a call."""
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(client, extra_body={"thread": {**kind, "previous_message_id": "msg_1"}})
    body: Any = refused.value.body
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert body["error"]["message"].startswith("thread is not honoured")


def test_a_tool_runner_sends_the_whole_conversation(client: Anthropic) -> None:
    @anthropic.beta_tool
    def get_weather(city: Literal["Paris", "Oslo"]) -> str:
        """Weather of a city."""
        return f"clear in {city}"

    runner = client.beta.messages.tool_runner(
        **REQUEST, tools=[get_weather], tool_choice={"type": "any"}, max_iterations=2
    )
    first, second = (
        message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
        for message in runner
    )
    assert second > first


def test_a_message_has_its_stop_reason(client: Anthropic) -> None:
    assert ask(client, max_tokens=2).stop_reason == "max_tokens"
    stopped = ask(client, stop_sequences=[" France"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " France")
    assert [block.text for block in stopped.content] == ["The capital of"]


def test_a_last_message_of_the_assistant_is_continued(client: Anthropic) -> None:
    begun = [*FRANCE, {"role": "assistant", "content": "The capital of France"}]
    assert ask(client, messages=begun).content[0].text == " is Paris."


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_forced_call_comes_whole_and_streamed(client: Anthropic, choice: Any) -> None:
    fields: Any = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 200}
    ask(client, **fields)  # from now on both continue from the same cells, and round alike
    answer = ask(client, **fields)
    [call] = answer.content
    assert call.type == "tool_use" and call.name == "get_weather"
    assert set(call.input) == {"city"} and answer.stop_reason == "tool_use"
    with client.messages.stream(**(REQUEST | fields)) as stream:
        [streamed] = stream.get_final_message().content
    assert streamed.type == "tool_use" and streamed.input == call.input


def test_an_answer_follows_a_schema(client: Anthropic) -> None:
    form = {"type": "json_schema", "schema": WEATHER["input_schema"]}
    for fields in {"output_config": {"format": form}}, {"extra_body": {"output_format": form}}:
        [block] = ask(client, **fields).content
        assert set(json.loads(block.text)) == {"city"}


def test_a_tools_result_is_part_of_the_chat(client: Anthropic) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [
        {"type": "text", "text": "clear"}]}  # fmt: skip
    turns = [
        *FRANCE,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    answer = ask(client, messages=turns, tools=[WEATHER], max_tokens=8)
    counted = client.messages.count_tokens(model="any", messages=turns, tools=[WEATHER])
    alone = client.messages.count_tokens(model="any", messages=FRANCE)
    assert counted.input_tokens > alone.input_tokens
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == counted.input_tokens
