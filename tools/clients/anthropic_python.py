"""The official Anthropic client for Python."""

from __future__ import annotations

from typing import Any

import anthropic

from tools.clients.actions import Server, action
from tools.clients.asked import USER, refused

NAME = "anthropic"
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def create(server: Server, **fields: Any) -> Any:
    api = anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=50)
    return api.messages.create(
        **({"model": server.model, "messages": USER, "max_tokens": 12} | fields)
    )


def accepted(name: str, needs: Any = "instruct", **fields: Any) -> None:
    """Add an action that passes if a message with these fields is answered."""

    @action(NAME, f"messages: {name}", needs)
    def run(server: Server) -> None:
        answer = create(server, **fields)
        assert answer.type == "message" and answer.role == "assistant", answer
        assert answer.stop_reason in ("end_turn", "max_tokens", "stop_sequence", "tool_use")
        assert answer.usage.input_tokens > 0


accepted("defaults")
accepted("a model name of Anthropic's", model="claude-sonnet-4-5")
accepted("a system text", system="Be brief.")
accepted("system blocks with cache_control", system=[
    {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])  # fmt: skip
accepted("content blocks", messages=[
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]}
])  # fmt: skip
accepted("a prefilled answer", messages=[*USER, {"role": "assistant", "content": "The capital"}])
accepted("stop_sequences and top_k", stop_sequences=["."], extra_body={"top_k": 40})
accepted("max_tokens over the context", max_tokens=64000, stop_sequences=["."],
         system="You are a helpful assistant.", extra_body={"temperature": 0})  # fmt: skip
accepted("metadata", metadata={"user_id": "u1"})
accepted("tools", "bundled", tools=[WEATHER])
accepted("thinking disabled", thinking={"type": "disabled"})
accepted("a tool's result", "bundled", tools=[WEATHER], messages=[
    *USER,
    {"role": "assistant", "content": [
        {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": "clear"}]},
])  # fmt: skip


@action(NAME, "messages: streamed")
def streamed(server: Server) -> None:
    kinds = [event.type for event in create(server, stream=True)]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert "content_block_delta" in kinds and "message_delta" in kinds


@action(NAME, "messages: stream helper")
def stream_helper(server: Server) -> None:
    api = anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)
    with api.messages.stream(model=server.model, messages=USER, max_tokens=12) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text  # type: ignore[union-attr]


@action(NAME, "messages: a forced tool call", "bundled")
def forced(server: Server) -> None:
    answer = create(server, tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=120)
    [call] = [block for block in answer.content if block.type == "tool_use"]
    assert call.name == "get_weather" and answer.stop_reason == "tool_use"


@action(NAME, "messages: a forced tool call, streamed", "bundled")
def forced_streamed(server: Server) -> None:
    choice = {"type": "tool", "name": "get_weather"}
    events = list(create(server, tools=[WEATHER], tool_choice=choice, max_tokens=120, stream=True))
    kinds = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert "input_json_delta" in kinds


@action(NAME, "count_tokens")
def count_tokens(server: Server) -> None:
    api = anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)
    assert api.messages.count_tokens(model=server.model, messages=USER).input_tokens > 3


@action(NAME, "a bad request is Anthropic's error")
def bad_request(server: Server) -> None:
    def is_theirs(error: anthropic.BadRequestError) -> bool:
        return isinstance(error.body, dict) and error.body["type"] == "error"

    with refused(anthropic.BadRequestError, is_theirs):
        create(server, messages=[])
