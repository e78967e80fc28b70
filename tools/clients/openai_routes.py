"""The official OpenAI client's other routes: completions, models, responses."""

from __future__ import annotations

from typing import Any

from tools.clients.actions import Server, action
from tools.clients.asked import USER, Person
from tools.clients.openai_python import FLAT_WEATHER, NAME, client


def complete(server: Server, **fields: Any) -> Any:
    given: dict[str, Any] = {"model": server.model, "prompt": "Once", "max_tokens": 8}
    return client(server).completions.create(**(given | fields))


@action(NAME, "completions: defaults")
def completion(server: Server) -> None:
    assert complete(server, prompt="Once upon a time").choices[0].text


@action(NAME, "completions: a list of prompts")
def completion_batch(server: Server) -> None:
    assert len(complete(server, prompt=["One", "Two"], max_tokens=4).choices) == 2


@action(NAME, "completions: streamed")
def completion_streamed(server: Server) -> None:
    assert list(complete(server, stream=True))


@action(NAME, "completions: echo with the prompt's logprobs and no token")
def completion_echo(server: Server) -> None:
    answer = complete(server, prompt="Once upon a time", max_tokens=0, echo=True, logprobs=1)
    found = answer.choices[0]
    assert found.text == "Once upon a time" and found.logprobs and found.logprobs.token_logprobs
    assert found.logprobs.token_logprobs[0] is None
    assert all(p is not None and p <= 0 for p in found.logprobs.token_logprobs[1:])


@action(NAME, "completions: best_of, n and suffix as null")
def completion_nulls(server: Server) -> None:
    nulls = {"best_of": None, "suffix": None, "n": None, "logprobs": None, "echo": None}
    assert complete(server, extra_body=nulls)


@action(NAME, "models: list and retrieve")
def models(server: Server) -> None:
    api = client(server)
    [first, *_] = list(api.models.list())
    assert "/" not in first.id and not first.id.endswith(".gguf")
    assert api.models.retrieve(first.id).id == first.id


@action(NAME, "responses: a text")
def responses(server: Server) -> None:
    answer = client(server).responses.create(
        model=server.model, input="Hello", max_output_tokens=16
    )
    assert answer.output_text and answer.status in ("completed", "incomplete")


@action(NAME, "responses: instructions and messages")
def responses_messages(server: Server) -> None:
    answer = client(server).responses.create(
        model=server.model, instructions="Be brief.", input=USER, max_output_tokens=16, store=False
    )
    assert answer.usage and answer.usage.output_tokens > 0


@action(NAME, "responses: streamed")
def responses_streamed(server: Server) -> None:
    events = client(server).responses.create(
        model=server.model, input="Hello", max_output_tokens=16, stream=True
    )
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds
    assert kinds[-1] in ("response.completed", "response.incomplete")


@action(NAME, "responses: parse a model", "bundled")
def responses_parse(server: Server) -> None:
    answer = client(server).responses.parse(
        model=server.model, input="Name a person", text_format=Person, max_output_tokens=200
    )
    assert isinstance(answer.output_parsed, Person)


@action(NAME, "responses: a forced tool call", "bundled")
def responses_tool(server: Server) -> None:
    answer = client(server).responses.create(
        model=server.model, input="Weather in Paris?", tools=[FLAT_WEATHER], tool_choice="required",
        max_output_tokens=120,
    )  # fmt: skip
    [call] = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "get_weather"


@action(NAME, "responses: stream helper")
def responses_stream_helper(server: Server) -> None:
    given: Any = {"model": server.model, "input": USER, "temperature": 0}
    with client(server).responses.stream(**given, max_output_tokens=100) as stream:
        kinds = [event.type for event in stream]
    assert "response.output_text.delta" in kinds
    assert kinds[-1] in ("response.completed", "response.incomplete")


@action(NAME, "responses: stream helper's final response", "bundled")
def responses_final(server: Server) -> None:
    """The SDK's helper has a final response only after `response.completed`."""
    given: Any = {"model": server.model, "input": USER, "temperature": 0}
    with client(server).responses.stream(**given, max_output_tokens=100) as stream:
        assert "Paris" in stream.get_final_response().output_text
