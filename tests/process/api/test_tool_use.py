"""Functions, end to end: the bundled model with a template for tools, and OpenAI's client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.conftest import StartWorker
from tests.support.bundled import bundled_with_template
from tests.support.worker import WorkerProcess

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]


class Unit(Enum):
    celsius = "celsius"
    kelvin = "kelvin"


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=12)
    unit: Unit
    days: int = Field(ge=1, le=9)
    hours: list[int] = Field(max_length=3)


LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look <there> & say what is seen",
        "parameters": {
            "type": "object",
            "properties": {"where": {"enum": ["up", "down"]}},
            "required": ["where"],
            "additionalProperties": False,
        },
    },
}
WEATHER: Any = openai.pydantic_function_tool(Weather, name="weather")  # with $ref and $defs
TOOLS: Any = [WEATHER, LOOK]
STAR: Any = {"type": "function", "function": LOOK["function"] | {"name": "*"}}
PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (*TOOLS, STAR)}


def only(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.fixture(scope="module")
def worker(share_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> WorkerProcess:
    """A worker with the bundled model's weights and a chat template for tools."""
    template = Path(__file__).with_name("tool_template.jinja").read_text()
    model = bundled_with_template(tmp_path_factory.mktemp("tools") / "tools.gguf", template)
    return share_worker("--model", str(model))


def the_call(name: str, arguments: str) -> Any:
    """Return the arguments of a call, which must match the function's schema."""
    found = json.loads(arguments)
    jsonschema.validate(found, PARAMETERS[name])
    return found


def assembled(chunks: Iterable[Any]) -> dict[str, Any]:
    """Assemble deltas like a client: ids and names come once, arguments in any pieces."""
    content, reason = "", None
    calls: dict[int, dict[str, str]] = {}
    for chunk in chunks:
        (choice,) = chunk.choices
        assert reason is None, "the reason to finish comes last"
        content += choice.delta.content or ""
        for delta in choice.delta.tool_calls or []:
            call = calls.setdefault(delta.index, {"id": "", "name": "", "arguments": ""})
            call["id"] += delta.id or ""
            call["name"] += delta.function.name or ""
            call["arguments"] += delta.function.arguments or ""
        reason = choice.finish_reason
    return {"content": content, "calls": list(calls.values()), "reason": reason}


def test_info_says_that_the_template_takes_tools(worker: WorkerProcess) -> None:
    assert worker.get("/info").json()["model"]["template_takes_tools"] is True


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "look", "*"}),
        (only("weather"), {"weather"}),
        (only("*"), {"*"}),
        (allowed("required", "weather"), {"weather"}),
        (allowed("required", "look", "weather"), {"weather", "look"}),
    ],
)
def test_a_forced_call_keeps_its_schema(client: OpenAI, choice: Any, names: set[str]) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            model="tools", messages=FRANCE, tools=[*TOOLS, STAR], tool_choice=choice, seed=seed
        )
        (found,) = answer.choices
        assert found.finish_reason == "tool_calls" and found.message.content is None
        assert found.message.tool_calls
        (call,) = found.message.tool_calls
        assert call.type == "function" and call.id.startswith("call_")
        assert call.function.name in names
        the_call(call.function.name, call.function.arguments)


def test_several_forced_calls_come_in_one_stream(client: OpenAI) -> None:
    """The model has not learned functions, so the number of calls is random."""
    fields: Any = {"model": "tools", "messages": FRANCE, "tools": [LOOK], "stream": True}
    several: Any = fields | {"tool_choice": "required", "parallel_tool_calls": True}
    for seed in range(4):
        streamed = assembled(client.chat.completions.create(**several, seed=seed))
        assert streamed["reason"] == "tool_calls" and streamed["content"] == ""
        calls = streamed["calls"]
        for call in calls:
            the_call(call["name"], call["arguments"])
        if len(calls) > 1:
            break
    assert len({call["id"] for call in calls}) == len(calls) > 1
    one = assembled(client.chat.completions.create(**(several | {"parallel_tool_calls": False})))
    assert len(one["calls"]) == 1 and one["reason"] == "tool_calls"


def test_each_choice_has_its_own_call(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tools", messages=FRANCE, tools=TOOLS, tool_choice="required", n=3, seed=1
    )
    calls = [choice.message.tool_calls for choice in answer.choices]
    ids = {call.id for found in calls for call in found or []}
    assert len(ids) == 3 and {choice.finish_reason for choice in answer.choices} == {"tool_calls"}


def test_the_clients_own_helpers_read_the_calls(client: OpenAI) -> None:
    tools: Any = TOOLS[:1]
    parsed = client.chat.completions.parse(
        model="tools", messages=FRANCE, tools=tools, tool_choice="required", seed=3
    )
    assert parsed.choices[0].message.tool_calls
    weather = parsed.choices[0].message.tool_calls[0].function.parsed_arguments
    assert isinstance(weather, Weather) and 1 <= weather.days <= 9
    with client.chat.completions.stream(
        model="tools", messages=FRANCE, tools=tools, tool_choice="required", seed=3
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == weather


LINE = 'start: "+" /[a-z "\\\\]{1,9}/ LF\n%import common.LF'
GRAMMAR = {"syntax": "lark", "definition": LINE}
PATCH: Any = {"name": "patch", "description": "Adds a line"}
CUSTOM: Any = {
    "type": "custom",
    "custom": PATCH | {"format": {"type": "grammar", "grammar": GRAMMAR}},
}
IN_LINE = re.compile(r'\+[a-z "\\]{1,9}\n')


def test_a_forced_call_of_a_custom_tool_follows_its_grammar(
    client: OpenAI, worker: WorkerProcess
) -> None:
    choice: Any = {"type": "custom", "custom": {"name": "patch"}}
    fields: Any = {"model": "tools", "messages": FRANCE, "tools": [LOOK, CUSTOM], "seed": 2}
    fields |= {"tool_choice": choice}
    (found,) = client.chat.completions.create(**fields).choices
    assert found.finish_reason == "tool_calls" and found.message.tool_calls
    (call,) = found.message.tool_calls
    assert call.type == "custom" and call.custom.name == "patch"
    assert IN_LINE.fullmatch(call.custom.input)
    # OpenAI's types of a chunk have no custom call, so it is read as a dict.
    deltas = [
        delta.to_dict()
        for chunk in client.chat.completions.create(**fields, stream=True)
        for delta in chunk.choices[0].delta.tool_calls or ()
    ]
    first: Any = deltas[0]
    assert first["type"] == "custom" and first["custom"]["name"] == "patch" and first["id"]
    assert "".join(delta["custom"]["input"] for delta in deltas) == call.custom.input
    turns = [*FRANCE, found.message.model_dump(), {"role": "tool", "tool_call_id": call.id}]
    applied = worker.post("/apply-template", {"messages": turns, "tools": [CUSTOM]})
    written = json.dumps({"name": "patch", "arguments": {"input": call.custom.input}})
    assert (
        written in applied.json()["prompt"] and json.dumps(LINE)[1:-1] in applied.json()["prompt"]
    )


def test_a_response_calls_custom_tools_and_those_of_namespaces(client: OpenAI) -> None:
    tools: Any = [
        {"type": "custom", **PATCH, "format": {"type": "grammar", **GRAMMAR}},
        {
            "type": "namespace",
            "name": "fs",
            "description": "Files",
            "tools": [{"type": "function", **LOOK["function"], "strict": False}],
        },
    ]
    fields: Any = {"model": "tools", "input": FRANCE, "tools": tools}
    for choice in ({"type": "custom", "name": "patch"}, "required"):
        kinds = set()
        for seed in range(8):
            request = fields | {"tool_choice": choice, "extra_body": {"seed": seed}}
            whole = client.responses.create(**request)
            with client.responses.stream(**request) as stream:
                events = list(stream)
                item: Any
                (item,) = stream.get_final_response().output
            (made,) = whole.output
            kinds.add(made.type)
            ids = {"id": "", "call_id": ""}
            streamed = item.to_dict() | ids
            streamed.pop("parsed_arguments", None)  # the SDK's own
            assert made.to_dict() | ids == streamed
            if made.type == "custom_tool_call":
                assert made.name == "patch" and IN_LINE.fullmatch(made.input)
                begun = [e for e in events if e.type == "response.custom_tool_call_input.delta"]
                assert "".join(event.delta for event in begun) == made.input
                (done,) = [e for e in events if e.type == "response.custom_tool_call_input.done"]
                assert done.input == made.input and done.item_id == item.id
            else:
                assert made.type == "function_call"
                assert (made.namespace, made.name) == ("fs", "look")
                the_call("look", made.arguments)
            if choice == "required" and len(kinds) == 2:
                break
        assert len(kinds) == (2 if choice == "required" else 1)
    call: Any = made.to_dict()
    result: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "up"}
    turns: Any = [*FRANCE, call, result]
    after = client.responses.create(model="tools", input=turns, tools=tools, max_output_tokens=4)
    assert after.usage and after.usage.input_tokens > 50


@pytest.mark.parametrize(
    ("choice", "tools"),
    [("none", TOOLS), ("none", openai.omit), ("auto", [LOOK]), (openai.omit, [LOOK])],
)
def test_an_answer_in_words_makes_no_call(client: OpenAI, choice: Any, tools: Any) -> None:
    fields: Any = {"messages": FRANCE, "temperature": 0, "max_tokens": 40}
    (found,) = client.chat.completions.create(
        model="tools", tools=tools, tool_choice=choice, **fields
    ).choices
    assert found.message.content and found.message.tool_calls is None
    if choice == "none":  # the tools are not in the prompt
        assert found.message.content == "The capital of France is Paris."
        assert found.finish_reason == "stop"


@pytest.mark.parametrize(("name", "called"), [("look", True), ("jump", False)])
def test_auto_recognises_a_call_of_an_offered_function_only(
    client: OpenAI, name: str, called: bool
) -> None:
    """This model has not learned functions; a grammar makes it write a call like others would."""
    written = json.dumps({"name": name, "arguments": {"where": "up"}})
    form = {"grammar": f"root ::= {json.dumps(written)}"}
    fields: Any = {"messages": FRANCE, "tools": [LOOK], "seed": 1, "extra_body": form}
    (found,) = client.chat.completions.create(model="tools", **fields).choices
    if called:
        assert found.finish_reason == "tool_calls"
        assert found.message.tool_calls and found.message.content is None
        call = found.message.tool_calls[0]
        assert call.type == "function" and the_call("look", call.function.arguments)
    else:  # not one of the offered functions
        assert found.finish_reason == "stop" and found.message.tool_calls is None
        assert json.loads(found.message.content or "")["name"] == "jump"


def test_calls_and_results_are_in_the_prompt(client: OpenAI, worker: WorkerProcess) -> None:
    answer = client.chat.completions.create(
        model="tools", messages=FRANCE, tools=[LOOK], tool_choice="required", seed=1
    )
    message = answer.choices[0].message
    assert message.tool_calls
    call = message.tool_calls[0]
    assert call.type == "function"
    where = json.loads(call.function.arguments)["where"]
    turns: Any = [
        *FRANCE,
        message.model_dump(),  # unchanged
        {"role": "tool", "tool_call_id": call.id, "content": "a <blue> sky"},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    applied = worker.post("/apply-template", {"messages": turns, "tools": [LOOK]})
    written = {"name": "look", "arguments": {"where": where}}
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    assert applied.json()["prompt"] == (
        "<|im_start|>system\nFunctions, one JSON schema a line:\n"
        f"{json.dumps(LOOK)}\n<|im_end|>\n"
        f"{question}<|im_start|>assistant\n"
        f"<tool_call>{json.dumps(written)}</tool_call><|im_end|>\n"
        f'<|im_start|>tool\n<tool_response id="{call.id}">a <blue> sky</tool_response><|im_end|>\n'
        f"{question}<|im_start|>assistant\n"
    )
    prompt_ids = worker.post(
        "/tokenize", {"content": applied.json()["prompt"], "add_special": True}
    ).json()["tokens"]
    after = client.chat.completions.create(
        model="tools", messages=turns, tools=[LOOK], temperature=0, max_tokens=16
    )
    assert after.usage and after.usage.prompt_tokens == len(prompt_ids)
    assert after.choices[0].message.content


def test_only_allowed_tools_are_in_the_prompt(worker: WorkerProcess) -> None:
    def input_tokens(path: str, **fields: Any) -> int:
        return int(worker.answer(f"{path}/input_tokens", fields)["input_tokens"])

    chat: dict[str, Any] = {"messages": FRANCE}
    alone = input_tokens("/v1/chat/completions", **chat, tools=[LOOK])
    chat["tools"] = TOOLS
    among = input_tokens("/v1/chat/completions", **chat, tool_choice=allowed("auto", "look"))
    assert alone == among < input_tokens("/v1/chat/completions", **chat)

    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [
        {"type": "function", "name": "weather"}, {"type": "mcp", "server_label": "a"}]}  # fmt: skip
    body = {"input": "Paris?", "tools": flat, "tool_choice": choice, "max_output_tokens": 200}
    answer = worker.post("/v1/responses", body).json()
    assert [item["name"] for item in answer["output"]] == ["weather"]
    assert answer["tool_choice"]["mode"] == "required"
    choice["tools"] = [{"type": "function", "name": "fly"}]
    refused = worker.post("/v1/responses", body).json()["error"]
    assert refused["param"] == "tool_choice.tools[0].name"

    group = {"type": "namespace", "name": "here", "tools": flat[:1]}
    grouped: dict[str, Any] = {"input": "Paris?", "tools": [group, *flat[1:]]}
    choice["tools"] = [{"type": "namespace", "name": "here"}]
    alone = input_tokens("/v1/responses", input="Paris?", tools=[group])
    assert alone == input_tokens("/v1/responses", **grouped, tool_choice=choice)
    assert alone < input_tokens("/v1/responses", **grouped)


def test_a_response_format_does_not_apply_to_a_forced_call(client: OpenAI) -> None:
    """Some clients send both and parse either."""
    answer = client.chat.completions.create(
        model="tools",
        messages=FRANCE,
        tools=TOOLS,
        tool_choice=only("weather"),
        response_format={"type": "json_object"},
    )
    assert answer.choices[0].message.tool_calls
    [call] = answer.choices[0].message.tool_calls
    assert call.type == "function"
    the_call(call.function.name, call.function.arguments)


def test_a_response_schema_allows_calls(client: OpenAI) -> None:
    """Agents send both: the model makes calls until it answers, and the answer follows the
    schema."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    fields: Any = {"messages": FRANCE, "tools": [LOOK], "response_format": form, "max_tokens": 64}
    called = set()
    for seed in range(40):
        answer = client.chat.completions.create(model="tools", seed=seed, temperature=2, **fields)
        (found,) = answer.choices
        if found.finish_reason == "length":
            continue
        called.add(bool(found.message.tool_calls))
        if found.message.tool_calls:
            (call,) = found.message.tool_calls
            assert call.type == "function" and call.function.name == "look"
            assert isinstance(json.loads(call.function.arguments), dict)
            assert (found.message.content, found.finish_reason) == (None, "tool_calls")
        else:
            assert json.loads(found.message.content or "") == {"city": "Paris"}
        if called == {False, True}:
            return
    raise AssertionError(f"in 40 answers there are only these: {called}")


@pytest.mark.parametrize(
    ("choice", "names_tools"), [("auto", True), ("none", False), ("required", False)]
)
def test_a_grammar_excludes_calls_and_the_tools_are_named_as_ignored(
    worker: WorkerProcess, choice: str, names_tools: bool
) -> None:
    fields = {"messages": FRANCE, "tools": [LOOK], "tool_choice": choice, "max_tokens": 4}
    answer = worker.post("/v1/chat/completions", {**fields, "grammar": 'root ::= "a"'})
    assert answer.status_code == 200
    ignored = answer.headers.get("x-ignored-fields", "")
    assert ("tools" in ignored.split(", ")) == names_tools
    assert "x-ignored-fields" not in worker.post("/v1/chat/completions", fields).headers


@pytest.mark.parametrize("stop", ['"where"', "wn", "}"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_stop_cuts_off_ends_with_stop(
    worker: WorkerProcess, stop: str, stream: bool
) -> None:
    body = {"messages": FRANCE, "max_tokens": 100, "stream": stream}
    look: Any = LOOK["function"]
    only_down = {**look["parameters"], "properties": {"where": {"enum": ["down"]}}}
    openais = {"type": "function", "function": {**look, "parameters": only_down}}
    chat = body | {"tools": [openais], "tool_choice": "required", "stop": [stop]}
    answer = worker.post("/v1/chat/completions", chat).text
    assert '"name":"look"' in answer and '"finish_reason":"stop"' in answer
    anthropics = {"name": "look", "input_schema": only_down}
    tools = {"tools": [anthropics], "tool_choice": {"type": "any"}, "stop_sequences": [stop]}
    answer = worker.post("/v1/messages", body | tools).text
    assert '"name":"look"' in answer and '"stop_reason":"stop_sequence"' in answer
