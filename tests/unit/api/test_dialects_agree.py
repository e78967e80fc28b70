"""A request means the same in every dialect: generated requests, written in each."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.support.chats import (
    BRIEF,
    TIME,
    TWO_CALLS,
    WEATHER,
    assistant,
    call,
    calling,
    result,
    user,
)
from tests.support.scripted_api import ScriptedWorker
from tests.support.scripted_engine import info
from tests.support.supervised import CONFIG
from tests.unit.api.round_trips import compiled, source
from worker.api.chat.chat_fields import ReasoningChatFields
from worker.api.chat.inference import inference_of
from worker.api.chat.prompt import chat_prompt
from worker.api.chat.reasoning import ReasoningChoice, reasoning_of
from worker.api.dialects.anthropic.schema import MessagesBody
from worker.api.dialects.anthropic.schema import read as read_messages
from worker.api.dialects.llama_server.schema import TokenizeBody
from worker.api.dialects.ollama.schema import ChatBody as OllamaChatBody
from worker.api.dialects.ollama.schema import read_chat as read_ollama
from worker.api.dialects.openai.schema import ChatBody, read_chat
from worker.api.dialects.responses.schema import ResponsesBody
from worker.api.dialects.responses.schema import read as read_response
from worker.api.http.state import AppState
from worker.engine.text.chat_template import ChatTemplate
from worker.errors import InvalidRequest
from worker.settings import Settings
from worker.wire.work import ChatPrompt

TEMPLATE = "{{ reasoning_effort == 'none' }}{{ thinking_budget }}"
SERVED = SimpleNamespace(has_chat_template=True, chat_template=TEMPLATE)
STATE = cast(AppState, SimpleNamespace(served=SERVED, settings=Settings()))
Fields = dict[str, Any]
NAMED: dict[str, Any] = {"function": {"name": "get_time"}}
ALLOWED: dict[str, Any] = {"mode": "auto", "tools": [NAMED]}
CHATS = st.fixed_dictionaries(
    {"messages": st.sampled_from([[user("Hi")], [BRIEF, user("Hi")], TWO_CALLS])},
    optional={
        "tools": st.sampled_from([[], [WEATHER], [WEATHER, TIME]]),
        "tool_choice": st.sampled_from(
            ["none", "auto", "required", NAMED]
            + [{"type": "allowed_tools", "allowed_tools": ALLOWED}]
        ),
        "parallel_tool_calls": st.booleans(),
        "add_generation_prompt": st.booleans(),
        "continue_final_message": st.booleans(),
        "chat_template_kwargs": st.sampled_from([{}, {"a": 1}, {"enable_thinking": True}]),
        "reasoning_effort": st.sampled_from(["none", "high", "odd"]),
        "reasoning_budget": st.integers(-1, 2),
        "reasoning_budget_message": st.just("Enough."),
        "reasoning_format": st.sampled_from(["none", "auto"]),
        "enable_thinking": st.booleans(),
        "verbosity": st.just("low"),
        "response_format": st.just({"type": "json_object"}),
        "max_tokens": st.integers(1, 9),
    },
)


@given(chat=CHATS)
def test_a_chat_is_read_alike_for_rendering_and_for_an_answer(chat: dict[str, Any]) -> None:
    def prompt(chat_of: Any) -> ChatPrompt | str:
        try:
            return chat_prompt(chat_of(), STATE)
        except InvalidRequest as refused:
            return refused.message

    answered = prompt(ChatBody.model_validate(chat).reasoning_chat)
    for body in (ReasoningChatFields, TokenizeBody):
        assert prompt(lambda body=body: body.model_validate(chat).reasoning_chat()) == answered


# --- one request in four dialects -----------------------------------------------------------------

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TEXTS = st.sampled_from(["Hello", "Grüße 🦊", "two\n\nparts", " <b> "])
CALLING = st.lists(st.sampled_from(["get_weather", "get_time"]), min_size=1, max_size=3)
FIELDS = st.fixed_dictionaries(
    {"seed": st.just(5), "max_tokens": st.integers(1, 10**6), "stream": st.booleans()},
    optional={
        "temperature": st.sampled_from([0, 0.5, 2.0]),
        "top_p": st.sampled_from([0.1, 1]),
        "top_k": st.sampled_from([-1, 0, 40]),
        "min_p": st.sampled_from([0, 0.2]),
        "repeat_penalty": st.sampled_from([1, 1.1]),
        "stop": st.sampled_from([[], ["x"], ["x", "\n"]]),
        "tool_choice": st.sampled_from(["none", "auto", "required", NAMED]),
        "parallel_tool_calls": st.just(False),
        "response_format": st.just(
            {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
        ),
        "reasoning_effort": st.sampled_from(["none", "low", "max"]),
        "enable_thinking": st.booleans(),
    },
)


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Generate bodies in OpenAI's format."""
    messages = [BRIEF] if draw(st.booleans()) else []
    n_calls = 0
    for _ in range(draw(st.integers(0, 2))):
        messages.append(user(draw(TEXTS)))
        thought = {"reasoning_content": draw(TEXTS)} if draw(st.booleans()) else {}
        if draw(st.booleans()):
            names = draw(CALLING)
            calls = [call(n_calls + at, name, city="Rom") for at, name in enumerate(names)]
            n_calls += len(names)
            messages.append(calling(*calls, **thought))
            thought = {}
            for each in draw(st.permutations(calls)):
                messages.append({**result(0, draw(TEXTS)), "tool_call_id": each["id"]})
        messages.append(assistant(draw(TEXTS), **thought))
    body = {"model": "m", "messages": [*messages, user(draw(TEXTS))], **draw(FIELDS)}
    return body | {"tools": [WEATHER, TIME]} if n_calls or "tool_choice" in body else body


def as_response(body: Fields) -> Fields:
    items: list[Fields] = []
    for message in body["messages"]:
        if message["role"] == "tool":
            output = {"call_id": message["tool_call_id"], "output": message["content"]}
            items.append({"type": "function_call_output", **output})
            continue
        if thought := message.get("reasoning_content"):
            part = {"type": "reasoning_text", "text": thought}
            items.append({"type": "reasoning", "summary": [], "content": [part]})
        if message["content"] is not None:
            items.append({"role": message["role"], "content": message["content"]})
        for each in message.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": each["id"], **each["function"]})
    found = {name: body[name] for name in SAMPLED & body.keys()}
    found |= {"input": items, "max_output_tokens": body["max_tokens"]}
    found["tools"] = [{"type": "function", **tool["function"]} for tool in body.get("tools", ())]
    found["parallel_tool_calls"] = body.get("parallel_tool_calls")
    choice = body.get("tool_choice")
    found["tool_choice"] = choice if choice != NAMED else {"type": "function", "name": "get_time"}
    found["reasoning"] = {"effort": body.get("reasoning_effort")}
    if "response_format" in body:
        found["text"] = {"format": {"type": "json_schema", "name": "x", "schema": CITY}}
    return found


def as_message(body: Fields) -> Fields:
    found = {name: body[name] for name in {*SAMPLED, "max_tokens"} & body.keys()}
    turns: list[Fields] = []
    for message in body["messages"]:
        match message["role"]:
            case "system":
                found["system"] = message["content"]
            case "tool":
                result = {"tool_use_id": message["tool_call_id"], "content": message["content"]}
                turns.append(user([{"type": "tool_result", **result}]))
            case role:
                blocks = []
                if thought := message.get("reasoning_content"):
                    blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
                if message["content"] is not None:
                    blocks.append({"type": "text", "text": message["content"]})
                for each in message.get("tool_calls", ()):
                    name, arguments = each["function"]["name"], each["function"]["arguments"]
                    use = {"id": each["id"], "name": name, "input": json.loads(arguments)}
                    blocks.append({"type": "tool_use", **use})
                turns.append({"role": role, "content": blocks})
    found |= {"messages": turns, "stop_sequences": body.get("stop", [])}
    functions = [tool["function"] for tool in body.get("tools", ())]
    found["tools"] = [
        {**function, "input_schema": function["parameters"], "parameters": None}
        for function in functions
    ]
    if functions:
        choice = body.get("tool_choice", "auto")
        found["tool_choice"] = (
            {"type": "tool", "name": "get_time"}
            if choice == NAMED
            else {"type": {"required": "any"}.get(choice, choice)}
        )
        is_one = body.get("parallel_tool_calls") is False
        found["tool_choice"]["disable_parallel_tool_use"] = is_one
    found["output_config"] = {"effort": body.get("reasoning_effort")}
    if "response_format" in body:
        found["output_config"]["format"] = {"type": "json_schema", "schema": CITY}
    if "enable_thinking" in body:
        found["thinking"] = {"type": "adaptive" if body["enable_thinking"] else "disabled"}
    return found


def as_ollama(body: Fields) -> Fields:
    options = {name: body[name] for name in {*SAMPLED, "stop"} & body.keys() - {"stream"}}
    found = {name: body[name] for name in ("model", "stream")}
    found["messages"] = [
        {**message, "thinking": message.get("reasoning_content"), "reasoning_content": None}
        for message in body["messages"]
    ]
    found["tools"] = body.get("tools")
    found["options"] = options | {"num_predict": body["max_tokens"]}
    found["think"] = body.get("reasoning_effort", body.get("enable_thinking"))
    if "response_format" in body:
        found["format"] = CITY
    return found


SAMPLED = {"seed", "stream", "temperature", "top_p", "top_k", "min_p", "repeat_penalty"}
DIALECTS: list[tuple[Any, Any, Any, set[str]]] = [
    (as_response, ResponsesBody, read_response, {"stop", "enable_thinking"}),
    (as_message, MessagesBody, read_messages, set()),
    (as_ollama, OllamaChatBody, read_ollama, {"tool_choice", "parallel_tool_calls"}),
]
"""A dialect's translation of OpenAI's body, its reader, and the fields that it lacks."""


def asked_by(
    model: Any, read: Any, body: Fields, state: AppState, template: ChatTemplate
) -> tuple[Any, ...]:
    """Return the engine's request for a body, and how the answer is read."""
    inference = inference_of(read(model.model_validate(body), state), state, None)
    [request] = inference.requests
    assert isinstance(request.prompt, ChatPrompt) and inference.parser_of is not None
    text = template.read(request.prompt).text()
    # Ollama's penalties count as many tokens as llama.cpp's; format fields differ.
    form = request.sampling.constraint and structs.replace(request.sampling.constraint, field="")
    sampling = structs.replace(request.sampling, repeat_last_n=64, constraint=form)
    use = inference.parser_of("")._use
    use = replace(use, tools={name: replace(use.tools[name], path="") for name in use.tools})
    return text, structs.replace(request, job_id="", prompt="", sampling=sampling), use


@settings(max_examples=20, deadline=None)
@given(body=bodies(), name=st.sampled_from(["Qwen-Qwen3-0.6B", "openai-gpt-oss-120b", "Kimi-K3"]))
def test_a_request_asks_the_same_in_each_dialect(body: Fields, name: str) -> None:
    served = info(CONFIG)
    metadata = {"tokenizer.chat_template": source(name)}
    served = replace(served, model=replace(served.model, metadata=metadata))
    state = ScriptedWorker(Settings(), served).state
    template = compiled(name)
    for translate, model, read, lacks in DIALECTS:
        same = {field: value for field, value in body.items() if field not in lacks}
        if translate is as_ollama and "reasoning_effort" in same:
            same |= {"reasoning_effort": "low", "enable_thinking": True}  # it has one field
        expected = asked_by(ChatBody, read_chat, same, state, template)
        assert asked_by(model, read, translate(same), state, template) == expected, translate


# --- reasoning: four places that set it --------------------------------------------

REASONING_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "enable_thinking": st.booleans(),
    "reasoning_effort": st.sampled_from(["none", "low", "odd"]),
    "thinking_budget": st.sampled_from([-1, 0, 7]),
}
SOME_REASONING = st.fixed_dictionaries({}, optional=REASONING_FIELDS)
ALL_REASONING = st.fixed_dictionaries(REASONING_FIELDS)
TEMPLATES = st.sampled_from(["", "{{ reasoning_effort == 'none' }}", "{{ thinking_budget }}"])


def reasoning(template: str, *places: Fields) -> tuple[ReasoningChoice, dict[str, Any]]:
    """Return the result of the request's fields, its kwargs, the flags and the flags' kwargs."""
    fields, kwargs, flags, flags_kwargs = (*places, {}, {}, {})[:4]
    settings = Settings(
        reasoning=("off", "on")[flags["enable_thinking"]] if "enable_thinking" in flags else "auto",
        reasoning_effort=flags.get("reasoning_effort"),
        reasoning_budget=flags.get("thinking_budget", -1),
        chat_template_kwargs=flags_kwargs,
    )
    served = SimpleNamespace(has_chat_template=True, chat_template=template)
    state = cast(AppState, SimpleNamespace(served=served, settings=settings))
    named = {name.replace("thinking_b", "reasoning_b"): value for name, value in fields.items()}
    body = {"messages": [user("Hi")], "chat_template_kwargs": kwargs, **named}
    chat = ChatBody.model_validate(body).reasoning_chat()
    return reasoning_of(chat, state), dict(chat_prompt(chat, state).template_kwargs or {})


@given(template=TEMPLATES, fields=SOME_REASONING)
def test_a_field_of_reasoning_equals_its_template_variable(template: str, fields: Fields) -> None:
    by_field, by_variable = reasoning(template, fields), reasoning(template, {}, fields)
    assert by_field[0] == by_variable[0]
    named = by_field[1]
    assert named == {name: by_variable[1][name] for name in named}
    if fields.get("thinking_budget", 0) == 0:  # as a flag, -1 is unset, and more is a limit
        assert reasoning(template, {}, {}, fields)[0] == by_field[0]


@given(
    template=TEMPLATES,
    is_on=st.booleans(),
    at=st.integers(0, 3),
    farther=st.tuples(SOME_REASONING, SOME_REASONING),
)
def test_the_nearest_switch_of_reasoning_wins(
    template: str, is_on: bool, at: int, farther: tuple[Fields, Fields]
) -> None:
    places = [*([{}] * at), {"enable_thinking": is_on}, *farther]
    found, variables = reasoning(template, *places)
    assert found[0] is variables["enable_thinking"] is variables["thinking"] is is_on
    assert (found[2] == 0) == (found[1] == "none") == (not is_on)


@given(
    template=TEMPLATES,
    nearest=ALL_REASONING,
    farther=st.tuples(SOME_REASONING, SOME_REASONING, SOME_REASONING),
)
def test_a_complete_choice_of_reasoning_ignores_all_defaults(
    template: str, nearest: Fields, farther: tuple[Fields, Fields, Fields]
) -> None:
    assert reasoning(template, nearest, *farther) == reasoning(template, nearest)
