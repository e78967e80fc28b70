"""The official OpenAI client for Python, as its documentation uses it."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
from openai import OpenAI
from pydantic import BaseModel, Field

from tools.clients.actions import Server, action
from tools.clients.asked import USER, WEATHER, Person, refused

NAME = "openai"
ONE_SENTENCE: dict[str, Any] = {
    "messages": [{"role": "system", "content": "You are a helpful assistant."}, *USER],
    "stop": ["."],
    "temperature": 0,
}
"""With its template's default system message SmolLM2 may never end."""
FLAT_WEATHER: Any = {"type": "function", **WEATHER["function"], "strict": True}


class Judgement(BaseModel):
    score: float = Field(ge=0.0, le=1.0)
    label: Literal["good", "bad"]
    reason: str | None = None


def client(server: Server) -> OpenAI:
    return OpenAI(base_url=server.v1, api_key="any", max_retries=0, timeout=50)


def chat(server: Server, **fields: Any) -> Any:
    given = {"model": server.model, "messages": USER, "max_tokens": 12} | fields
    return client(server).chat.completions.create(**given)


def accepted(name: str, needs: Any = "instruct", **fields: Any) -> None:
    """Add an action that passes if a chat with these fields is answered."""

    @action(NAME, f"chat: {name}", needs)
    def run(server: Server) -> None:
        answer = chat(server, **fields)
        assert answer.choices[0].finish_reason in ("stop", "length"), answer


accepted("defaults")
accepted("a model name of OpenAI's", model="gpt-4o-mini")
accepted("without max_tokens but a stop", max_tokens=None, **ONE_SENTENCE)
accepted("max_completion_tokens", max_tokens=None, max_completion_tokens=12)
accepted("max_tokens far over the context, a stop", max_tokens=32000, **ONE_SENTENCE)
accepted("both token limits", max_completion_tokens=8)
accepted("temperature 0 and a seed", temperature=0, seed=7)
accepted("temperature and top_p", temperature=1.3, top_p=0.9)
accepted("penalties", frequency_penalty=0.5, presence_penalty=-0.5)
accepted("logit_bias", logit_bias={"1": -100})
accepted("sixteen stops", stop=[f"word{n}" for n in range(16)])
accepted("an empty stop list", stop=[])
accepted("one empty stop", stop="")
accepted("user", user="someone")
accepted("an empty user", user="")
accepted("metadata and store", metadata={"run": "7"}, store=False)
accepted("service_tier", service_tier="auto")
accepted("safety_identifier", extra_body={"safety_identifier": "abc"})
accepted("prompt_cache_key", extra_body={"prompt_cache_key": "abc"})
accepted("reasoning_effort", reasoning_effort="low")
accepted("verbosity", extra_body={"verbosity": "low"})
accepted("parallel_tool_calls without tools", extra_body={"parallel_tool_calls": True})
accepted("no tools in a list", extra_body={"tools": []})
accepted("tool_choice auto without tools", extra_body={"tool_choice": "auto"})
accepted("stream_options without stream", extra_body={"stream_options": None})
accepted("prediction", prediction={"type": "content", "content": "Paris"})
accepted("modalities text", modalities=["text"])
accepted("n=1 and logprobs off", n=1, logprobs=False)
accepted("nulls for everything optional", extra_body={
    "temperature": None, "top_p": None, "stop": None, "seed": None, "tools": None,
    "tool_choice": None, "response_format": None, "logit_bias": None, "user": None,
    "functions": None, "stream": None, "n": None, "logprobs": None, "top_logprobs": None,
})  # fmt: skip
accepted("an unknown field", extra_body={"some_future_field": {"a": 1}})
accepted("llama.cpp's names", extra_body={
    "n_predict": 8, "repeat_penalty": 1.1, "min_p": 0.05, "top_k": 40, "cache_prompt": True,
    "typical_p": 1.0, "mirostat": 0, "n_keep": 0,
})  # fmt: skip
accepted("vLLM's names", extra_body={
    "repetition_penalty": 1.05, "top_k": -1, "min_tokens": 1, "stop_token_ids": [0],
    "skip_special_tokens": True, "ignore_eos": False, "add_generation_prompt": True,
    "spaces_between_special_tokens": True, "cache_salt": "tenant",
})  # fmt: skip
accepted("chat_template_kwargs", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
accepted("response_format text", response_format={"type": "text"})
accepted("a system message", messages=[{"role": "system", "content": "Be brief."}, *USER])
accepted("a developer message", messages=[{"role": "developer", "content": "Be brief."}, *USER])
accepted("two text parts", messages=[
    {"role": "user", "content": [{"type": "text", "text": "Hello."},
                                 {"type": "text", "text": "Who are you?"}]},
])  # fmt: skip
accepted("a part with cache_control", messages=[
    {"role": "user", "content": [
        {"type": "text", "text": "Hello.", "cache_control": {"type": "ephemeral"}}]},
])  # fmt: skip
accepted("a replayed answer with its empty fields", messages=[
    *USER,
    {"role": "assistant", "content": "Paris.", "refusal": None, "annotations": [], "audio": None,
     "function_call": None, "tool_calls": None, "reasoning_content": None, "index": 0},
    {"role": "user", "content": "And of Spain?"},
])  # fmt: skip
accepted("an assistant message without content", messages=[
    *USER, {"role": "assistant", "content": None}, {"role": "user", "content": "Go on."},
])  # fmt: skip
accepted("a name on a message", messages=[{**USER[0], "name": "alice"}])
accepted("a conversation that ends with the assistant", messages=[
    *USER, {"role": "assistant", "content": "The capital is"}])  # fmt: skip
accepted("json_object", response_format={"type": "json_object"}, max_tokens=60)
accepted("tools, auto", "bundled", tools=[WEATHER], max_tokens=40)
accepted("tools, none", tools=[WEATHER], tool_choice="none")
accepted("a long prompt", messages=[{"role": "user", "content": "word " * 5000}])


@action(NAME, "chat: more prompt than the context is context_length_exceeded")
def over_the_context(server: Server) -> None:
    with refused(openai.BadRequestError, lambda error: error.code == "context_length_exceeded"):
        chat(server, messages=[{"role": "user", "content": "word " * 60000}])


@action(NAME, "chat: the bundled model knows", "bundled")
def right(server: Server) -> None:
    answer = chat(server, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.prompt_tokens > 0 and answer.usage.completion_tokens > 0


@action(NAME, "chat: streamed")
def streamed(server: Server) -> None:
    chunks = list(chat(server, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


@action(NAME, "chat: streamed with usage")
def streamed_usage(server: Server) -> None:
    chunks = list(chat(server, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.total_tokens > 0 and chunks[-1].choices == []


@action(NAME, "chat: streamed with include_usage null")
def streamed_usage_null(server: Server) -> None:
    assert list(chat(server, stream=True, extra_body={"stream_options": {"include_usage": None}}))


@action(NAME, "chat: logprobs")
def logprobs(server: Server) -> None:
    answer = chat(server, logprobs=True, top_logprobs=3)
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3


@action(NAME, "chat: n=2")
def two_choices(server: Server) -> None:
    assert len(chat(server, n=2).choices) == 2


@action(NAME, "chat: raw response and headers")
def raw(server: Server) -> None:
    given: Any = {"model": server.model, "messages": USER, "max_tokens": 4}
    response = client(server).chat.completions.with_raw_response.create(**given)
    assert response.headers["content-type"].startswith("application/json")


@action(NAME, "chat: stream helper")
def stream_helper(server: Server) -> None:
    given: Any = {"model": server.model, "messages": USER, "max_tokens": 8}
    with client(server).chat.completions.stream(**given) as stream:
        kinds = {event.type for event in stream}
    assert "content.delta" in kinds and "content.done" in kinds


@action(NAME, "chat: async, ten at once")
def ten_at_once(server: Server) -> None:
    async def all_of_them() -> list[Any]:
        api = openai.AsyncOpenAI(base_url=server.v1, api_key="any", max_retries=0)
        given: Any = {"model": server.model, "messages": USER, "max_tokens": 8}
        return await asyncio.gather(*(api.chat.completions.create(**given) for _ in range(10)))

    assert len(asyncio.run(all_of_them())) == 10


@action(NAME, "chat: parse a model", "bundled")
def parse(server: Server) -> None:
    given: Any = {"model": server.model, "messages": USER, "max_tokens": 200, "temperature": 0.5}
    parsed = client(server).chat.completions.parse(**given, response_format=Person)
    assert isinstance(parsed.choices[0].message.parsed, Person)


@action(NAME, "chat: parse bounded floats and an optional", "bundled")
def parse_bounds(server: Server) -> None:
    given: Any = {"model": server.model, "messages": USER, "max_tokens": 300, "temperature": 0.5}
    parsed = client(server).chat.completions.parse(**given, response_format=Judgement)
    found = parsed.choices[0].message.parsed
    assert isinstance(found, Judgement) and 0 <= found.score <= 1


@action(NAME, "chat: json_schema without a name")
def nameless_schema(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert chat(server, response_format=form, max_tokens=60).choices[0].message.content


@action(NAME, "chat: a forced tool call", "bundled")
def forced_call(server: Server) -> None:
    answer = chat(server, tools=[WEATHER], tool_choice="required", max_tokens=120)
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"


@action(NAME, "chat: a forced tool call with SmolLM2's template")
def forced_call_instruct(server: Server) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = chat(server, tools=[WEATHER], tool_choice=choice, max_tokens=120)
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"
    assert answer.choices[0].finish_reason in ("stop", "tool_calls", "length")


@action(NAME, "chat: a tool's result comes back")
def tool_result(server: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"sky": "clear"}'},
    ]
    assert chat(server, messages=messages, tools=[WEATHER]).choices[0].finish_reason


@action(NAME, "chat: a forced tool call, streamed", "bundled")
def forced_call_streamed(server: Server) -> None:
    chunks = chat(server, tools=[WEATHER], tool_choice="required", max_tokens=120, stream=True)
    calls = [c for chunk in chunks for c in (chunk.choices[0].delta.tool_calls or [])]
    assert calls[0].function.name == "get_weather" and len(calls) >= 2


@action(NAME, "responses: a custom tool's text in its form, streamed", "bundled")
def custom_tool(server: Server) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-z]{1,9}"}
    fields: dict[str, Any] = {"tools": [{"type": "custom", "name": "say", "format": form}]}
    fields |= {"tool_choice": {"type": "custom", "name": "say"}}
    with client(server).responses.stream(model=server.model, input="Hi", **fields) as stream:
        kind = "response.custom_tool_call_input.delta"
        text = "".join(event.delta for event in stream if event.type == kind)
        (called,) = stream.get_final_response().output
    assert called.type == "custom_tool_call" and called.input == text and text.isalpha()


@action(NAME, "chat: several forced tool calls, streamed", "bundled")
def forced_calls_streamed(server: Server) -> None:
    fields: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": True}
    chunks = chat(server, tools=[WEATHER], max_tokens=1500, stream=True, **fields)
    deltas = [c for chunk in chunks for c in (chunk.choices[0].delta.tool_calls or [])]
    assert deltas[0].function.name == "get_weather"
    assert [d.index for d in deltas] == sorted(d.index for d in deltas)
