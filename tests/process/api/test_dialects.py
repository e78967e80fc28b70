"""OpenAI's responses and Anthropic's messages, on the real process."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import NotFoundError, OpenAI
from pydantic import BaseModel, Field

from tests.support.pictures import picture
from tests.support.sse import parse
from tests.support.worker import WorkerProcess

FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."
PICTURE = {"type": "base64", "data": base64.b64encode(picture()).decode()}
LOOK = {"type": "object", "properties": {"where": {"enum": ["up", "down"]}}, "required": ["where"]}


# --- Anthropic ---------------------------------------------------------------------------


def message(worker: WorkerProcess, **fields: Any) -> httpx.Response:
    body = {"model": "m", "max_tokens": 300, "temperature": 0, **fields}
    return worker.post("/v1/messages", body)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [event for event in parse(answer.text.split("\n")) if event]


def test_models_are_listed_for_anthropics_clients_and_openais(worker: WorkerProcess) -> None:
    """Both use the same path and get the same answer."""
    url, key = worker.base_url, "none"
    with (
        Anthropic(base_url=url, api_key=key, _strict_response_validation=True) as anthropic,
        OpenAI(base_url=f"{url}/v1", api_key=key, _strict_response_validation=True) as openai,
    ):
        page, [listed] = anthropic.models.list(), openai.models.list()
        [one] = page
        assert one.id == anthropic.models.retrieve(one.id).id == listed.id
        assert one.id == openai.models.retrieve(one.id).id
        with pytest.raises(NotFoundError, match="no other"):
            openai.models.retrieve("gpt-4")
    assert (page.has_more, page.first_id, page.last_id) == (False, one.id, one.id)
    assert (one.type, one.display_name, one.lifecycle) == ("model", one.id, "active")
    assert listed.object == "model"
    assert abs(listed.created - one.created_at.timestamp()) <= 1
    assert one.max_input_tokens == one.max_tokens == 1024


def test_a_keyword_that_a_forced_call_does_not_enforce_is_named(worker: WorkerProcess) -> None:
    unique = {"type": "object", "properties": {"n": {"type": "array", "uniqueItems": True}}}
    fields = {"tools": [{"name": "count", "input_schema": unique}], "max_tokens": 8}
    answer = message(worker, messages=user("Count!"), tool_choice={"type": "any"}, **fields)
    assert answer.status_code == 200 and "uniqueItems" in answer.headers["x-ignored-fields"]


def test_a_call_that_is_cut_off_has_its_partial_arguments(worker: WorkerProcess) -> None:
    text = {"type": "object", "properties": {"t": {"type": "string", "minLength": 400}}}
    tools = [{"name": "say", "input_schema": text | {"required": ["t"]}}]
    forced = {"type": "tool", "name": "say"}
    fields = {"messages": user("Speak!"), "tools": tools, "tool_choice": forced, "max_tokens": 60}
    cut = message(worker, **fields).json()
    assert cut["stop_reason"] == "max_tokens" and cut["content"][-1]["name"] == "say"
    begun = cut["content"][-1]["input"]["t"]
    deltas = [e["delta"] for e in events_of(message(worker, **fields, stream=True)) if "delta" in e]
    sent = "".join(delta.get("partial_json", "") for delta in deltas)
    assert begun and json.dumps(begun, ensure_ascii=False)[1:-1] in sent


# --- OpenAI's responses ------------------------------------------------------------------


class Person(BaseModel):
    name: str = Field(max_length=8)
    score: float = Field(ge=0.0, le=1.0)


def test_a_response_has_the_log_probabilities_of_the_chat(client: OpenAI) -> None:
    """They equal the chat's, whole and streamed, in OpenAI's models."""
    messages: Any = user(FRANCE)
    chat = client.chat.completions.create(
        model="m", messages=messages, temperature=0, logprobs=True, top_logprobs=2
    )
    fields: Any = {"model": "m", "input": FRANCE, "temperature": 0, "top_logprobs": 2}
    fields |= {"include": ["message.output_text.logprobs"]}
    part: Any = client.responses.create(**fields).output[0]
    [part] = part.content
    assert chat.choices[0].logprobs and chat.choices[0].logprobs.content
    expected = [each.model_dump() for each in chat.choices[0].logprobs.content]
    # A chat also has the token that ends it.
    assert [each.model_dump() for each in part.logprobs] == expected[: len(part.logprobs)]
    assert "".join(each.token for each in part.logprobs) == PARIS
    with client.responses.stream(**fields) as stream:
        events = list(stream)
        streamed: Any = stream.get_final_response().output[0]
    assert streamed.content[0].logprobs == part.logprobs
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    [done] = [e for e in events if e.type == "response.output_text.done"]
    tokens = [each.token for event in deltas for each in event.logprobs]
    assert tokens == [each.token for each in done.logprobs]
    assert "".join(tokens) == PARIS and len(done.logprobs[0].top_logprobs or ()) == 2


@pytest.mark.parametrize(
    ("fields", "n_top"),
    [
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"top_logprobs": 20}, 20),
        ({"top_logprobs": 0}, None),
        ({"include": ["reasoning.encrypted_content"]}, None),
    ],
)
def test_a_response_has_log_probabilities_only_on_request(
    worker: WorkerProcess, fields: dict[str, Any], n_top: int | None
) -> None:
    answer = worker.post("/v1/responses", {"input": FRANCE, "max_output_tokens": 2, **fields})
    found = answer.json()["output"][0]["content"][0]["logprobs"]
    assert {len(each["top_logprobs"]) for each in found} == (set() if n_top is None else {n_top})
    ignored = answer.headers.get("x-ignored-fields", "")
    assert ("include.reasoning.encrypted_content" in ignored) == ("reasoning" in str(fields))


def test_a_response_is_parsed(client: OpenAI) -> None:
    answer = client.responses.parse(
        model="m", input="Invent a person.", text_format=Person, max_output_tokens=200
    )
    assert answer.output_parsed and 0 <= answer.output_parsed.score <= 1


def test_a_function_is_called_and_its_output_read(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "look", "parameters": LOOK, "strict": True}]
    messages: Any = [{"role": "user", "content": "Look!"}]
    first = client.responses.create(
        model="m", input=messages, tools=[*tools, {"type": "web_search"}], tool_choice="required"
    )
    assert [each.to_dict() for each in first.tools] == [
        {**tools[0], "description": None}, {"type": "web_search"}
    ]  # fmt: skip
    call: Any = first.output[-1]
    assert call.type == "function_call" and json.loads(call.arguments)["where"] in ("up", "down")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "A star."}
    turns = [*messages, call.model_dump(), output, {"role": "user", "content": FRANCE}]
    again = client.responses.create(model="m", input=turns, tools=tools, max_output_tokens=30)
    assert again.output


def test_references_to_stored_responses_are_refused(worker: WorkerProcess) -> None:
    """Without the turns to which these refer, an answer would be wrong."""
    references = {"previous_response_id": "resp_1", "conversation": "a", "prompt": {"id": "pmpt_1"}}
    for name, value in references.items():
        answer = worker.post("/v1/responses", {"model": "m", "input": "a", name: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name
    for item in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}):
        answer = worker.post("/v1/responses", {"input": [*user("a"), item]})
        error = answer.json()["error"]
        assert error["param"] == "input[1]" and "nothing is stored" in error["message"]
    errors = worker.post("/v1/responses", {"input": "a", **references}).json()["error"]["errors"]
    assert [error["field"] for error in errors] == [*references]
    absent = dict.fromkeys(references)
    answer = worker.post("/v1/responses", {"input": "a", "max_output_tokens": 1, **absent})
    assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers


def test_an_error_of_messages_has_anthropics_type_for_its_status(worker: WorkerProcess) -> None:
    """Its clients decide by the type whether to retry."""
    body = {"model": "m", "max_tokens": 1, "messages": user("a")}
    late = worker.post("/v1/messages", body, {"X-Deadline": "1"})
    wrong_method = worker.get("/v1/messages")
    assert (late.status_code, wrong_method.status_code) == (504, 405)
    assert late.json()["error"]["type"] == "timeout_error"
    assert wrong_method.json()["error"]["type"] == "invalid_request_error"


def test_a_response_that_is_cut_off_is_incomplete(worker: WorkerProcess) -> None:
    metadata = {"run": "7"}
    body = {"input": FRANCE, "max_output_tokens": 3, "temperature": 0, "metadata": metadata}
    whole = worker.post("/v1/responses", body).json()
    assert whole["metadata"] == metadata
    assert whole["status"] == "incomplete" and whole["output"][-1]["status"] == "incomplete"
    events = events_of(worker.post("/v1/responses", body | {"stream": True}))
    last = events[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    [done] = [e for e in events if e["type"] == "response.output_item.done"]
    assert done["item"]["status"] == "incomplete"


# --- faults of clients ---------------------------------------------------------------------

USE = {"type": "tool_use", "id": "1", "input": {}}
CALL = USE | {"name": "look"}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "a"}
SEEN: Any = {"type": "image", "source": PICTURE}
SEEN = {"type": "search_result", "source": "a", "content": [SEEN]}
SOURCE = "messages[0].content[0].source.type"


def read_of(source: Any, kind: str = "document") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": kind, "source": source}]}]}


def choosing(name: str | None) -> dict[str, Any]:
    choice = {"type": "tool", "name": name, "disable_parallel_tool_use": None}
    return {"messages": user("a"), "tools": [], "tool_choice": choice}


def allowing(*names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
    return {"tools": tools, "tool_choice": choice}


RIGHT: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("/v1/chat/completions", "/api/chat"), {"messages": user("a")}),
    **dict.fromkeys(("/v1/completions", "/api/generate"), {"prompt": "a"}),
    "/v1/messages": {"messages": user("a"), "max_tokens": 8},
    "/v1/responses": {"input": "a"},
}
USER = {"role": "user"}
LOOKS = {"type": "function", "function": {"name": "look"}}
STRING = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
FLY = {"type": "function", "function": {"name": "fly"}}
EDITS = {"type": "custom", "custom": {"name": "edit"}}
EDIT = {"type": "custom", "name": "b"}
GROUP = {"type": "namespace", "name": "a", "tools": [EDIT, {"type": "function", "name": "c"}]}
NO_GROUP = {"type": "allowed_tools", "tools": [{"type": "namespace", "name": "b"}], "mode": "auto"}
BROKEN = {**EDIT, "format": {"type": "grammar", "syntax": "lark", "definition": "start: ("}}
LINES = 'start: "a"\n' + "#" * 15_000
LONG = {**EDIT, "format": {"type": "grammar", "syntax": "lark", "definition": LINES}}
BOTH_ENDS = {"add_generation_prompt": True, "continue_final_message": True}
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    ({"messages": user("a " * 2000)}, "messages"),
    ({"tools": [LOOKS], "tool_choice": FLY}, "tool_choice.function.name"),
    ({"tools": [LOOKS], "tool_choice": "always"}, "tool_choice"),
    ({"chat_template_kwargs": {"enable_thinking": "false"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"thinking": "false"}}, "chat_template_kwargs"),
    ({"tools": [LOOKS], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    (allowing("look") | {"tools": [FLY]}, "tool_choice.allowed_tools.tools[0].function.name"),
    ({"tools": [{"type": "code", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0]"),
    (
        {"tools": [EDITS, {"type": "function", "function": {"name": "edit"}}]},
        "tools[1].function.name",
    ),
    ({"tools": [EDITS], "tool_choice": {"type": "custom"}}, "tool_choice"),
    ({"tools": [STRING], "tool_choice": "required"}, "tools[0].function.parameters.type"),
    ({"reasoning_budget": -2}, "reasoning_budget"),
    ({"reasoning_budget": "ten"}, "reasoning_budget"),
    ({"reasoning_format": "xml"}, "reasoning_format"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"documents": [{"text": "a"}]}, "documents"),
    ({"echo": True}, "echo"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"regex": "a+"}, "regex"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    (BOTH_ENDS, "add_generation_prompt"),
    ({"seed": "5"}, "seed"),
    ({"functions": [{"name": "f"}]}, "functions"),
    (
        {"messages": [*user("a"), {"role": "assistant", "function_call": {"name": "f"}}]},
        "messages[1].function_call",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    (
        {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}], **USER}]},
        "messages[0].content[0].image_url.url",
    ),
]
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"suffix": "b"}, "suffix"),
    ({"prompt": [1], "suffix": "b"}, "suffix"),
    ({"best_of": 4}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"n": 0}, "n"),
]
RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": [LOOKS]}, "tools[0]"),
    ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0]"),
    ({"tools": [GROUP, {"type": "function", "name": "a__b"}]}, "tools[1].name"),
    ({"tools": [GROUP], "tool_choice": {"type": "custom", "name": "b"}}, "tool_choice.name"),
    ({"tools": [GROUP], "tool_choice": NO_GROUP}, "tool_choice.tools[0].name"),
    ({"tools": [GROUP] * 600}, "tools"),
    ({"tools": [BROKEN]}, "tools[0].format.definition"),
    ({"tools": [LONG] * 3}, "tools[2].format.definition"),
    ({"tools": [{**BROKEN, "format": {"type": "grammar"}}]}, "tools[0].format"),
    ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0]"),
    ({"input": [{"type": "item_reference"}]}, "input[0]"),
    ({"input": [{"type": "web_search_call"}]}, "input"),
    ({"input": [{"type": "compaction", "encrypted_content": "a"}]}, "input[0]"),
    ({"input": [{"type": "custom_tool_call", "call_id": "1"}]}, "input[0]"),
    ({"input": [{"type": "additional_tools", "tools": [LOOKS]}]}, "input[0].tools[0]"),
    ({"previous_input_messages": [{"role": "user"}]}, "previous_input_messages"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"input": "a " * 2000}, "input"),
]
SEARCH = {"type": "web_search_20260209", "name": "web_search", "max_uses": 8}
MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "assistant", "content": [USE]}]}, "messages[0]"),
    ({"messages": [{"role": "assistant", "content": [CALL]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [RESULT] * 4097}]}, "messages"),
    (read_of({"type": "base64", "media_type": "application/pdf"}), SOURCE),
    (read_of({"type": "url", "url": "https://a.b/c.pdf"}), SOURCE),
    (read_of({"type": "file", "file_id": "1"}), SOURCE),
    (read_of({"type": "text", "data": "a"}, "image"), SOURCE),
    (read_of("a", "document"), "content[0].source"),
    (read_of(None, "document"), "messages[0].content[0]"),
    (read_of({"type": "text"}, "search_result"), "content[0].source"),
    ({"messages": [{"role": "user", "content": [SEEN]}]}, "content[0].type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type must be custom"),
    ({"tools": [{"input_schema": {}}]}, "tools[0] of type custom needs name"),
    ({"messages": [{"role": "user"}]}, "messages[0] of role user needs content"),
    ({"messages": [{"role": "system"}]}, "messages"),
    *((choosing(name), "tool_choice") for name in (None, "", "a" * 257)),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
]
OLLAMAS: list[tuple[str, dict[str, Any], str]] = [
    ("/api/chat", {"messages": [{"role": "user", "images": ["aGk="]}]}, "images"),
    ("/api/chat", {"messages": [{"content": "a"}]}, "messages[0].role"),
    ("/api/chat", {"tools": [{"type": "function"}]}, "tools[0]"),
    ("/api/chat", {"think": 5}, "think must be true or false or a text"),
    ("/api/chat", {"format": "yaml"}, "format"),
    ("/api/chat", {"options": {"temperature": 5000}}, "options.temperature"),
    ("/api/generate", {"images": ["aGk="]}, "images"),
    ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
    ("/api/chat", {"_debug_render_only": True}, "debug_render_only is not supported"),
    ("/api/generate", {"context": [1, 2]}, "context is not supported; send the conversation"),
    ("/api/generate", {"suffix": "b"}, "suffix"),
]
GAP = {"input_prefix": "a", "input_suffix": "b"}
LLAMA_SERVERS: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {"content": "a", "messages": [{"role": "user"}]}, "content"),
    ("/tokenize", {"content": ["a", 1024]}, "content"),
    ("/detokenize", {"tokens": [5, 1024]}, "tokens"),
    ("/detokenize", {"tokens": [2**31 - 1]}, "tokens"),
    ("/apply-template", {}, "messages"),
    ("/apply-template", {"messages": user("a"), **BOTH_ENDS}, "add_generation_prompt"),
    ("/apply-template", {"messages": user("a"), "tool_choice": "required"}, "tool_choice"),
    ("/tokenize", {"messages": user("a"), "tool_choice": FLY}, "tool_choice"),
    ("/lora-adapters", {"lora": [{"id": 0, "scale": 1}]}, "lora[0].id"),
    ("/tools", {}, "tool"),
    ("/infill", GAP, "input_suffix"),
    ("/infill", GAP | {"input_extra": [{}]}, "input_extra[0].text"),
    ("/infill", {"input_suffix": "b"}, "input_prefix"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
]


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        *(("/v1/chat/completions", *row) for row in CHATS),
        *(("/v1/completions", *row) for row in COMPLETIONS),
        *(("/v1/responses", *row) for row in RESPONSES),
        *(("/v1/messages", *row) for row in MESSAGES),
        *(("/v1/messages/count_tokens", choosing(name), "tool_choice") for name in (None, "")),
        ("/v1/messages/count_tokens", {"messages": user("a"), "thread": {}}, "thread"),
        *OLLAMAS,
        *LLAMA_SERVERS,
    ],
)
def test_an_invalid_field_is_named(
    worker: WorkerProcess, path: str, fields: dict[str, Any], named: str
) -> None:
    """By its field, or in the message if the format has no place for a field."""
    refused = worker.post(path, {"model": "m", **RIGHT.get(path, {}), **fields})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    if isinstance(error, str):  # Ollama's
        assert named in error
        return
    assert error["type"] == "invalid_request_error" and error["message"]
    if "param" in error:
        assert error["param"] == named
    else:
        assert named in error["message"]


def test_reasoning_text_and_calls_of_one_turn_are_one_message(worker: WorkerProcess) -> None:
    """Consecutive reasoning, text and calls are one message of the assistant. Some templates refuse
    another message between a call and its result, and Gemma's then lose the result."""
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    message = {"type": "message", "role": "assistant", "content": "I look."}
    result = {"type": "function_call_output", "call_id": "1", "output": "A star."}
    counts = [
        worker.post(
            "/v1/responses/input_tokens", {"input": [*user("Look!"), *items, *user("And?")]}
        ).json()["input_tokens"]
        for items in ((message, call, result), (call, message, result))
    ]
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    turns = [
        *user("Look!"),
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [{**RESULT, "content": "A star."}]},
        *user("And?"),
    ]
    counted = worker.post("/v1/messages/count_tokens", {"messages": turns}).json()
    assert counts == [counted["input_tokens"]] * 2


def test_documents_and_search_results_are_read_as_text(worker: WorkerProcess) -> None:
    """Each becomes a paragraph, after lines with its title and its context."""

    def counted(content: Any) -> tuple[int, str]:
        answer = worker.post(
            "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": content}]}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["input_tokens"], answer.headers.get("x-ignored-fields", "")

    def text(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text}

    plain = {"type": "text", "media_type": "text/plain", "data": "The sun is red."}
    parts = {"type": "content", "content": [text("The sun"), text("is red.")]}
    found: Any = {"type": "search_result", "source": "https://a.b", "title": "Sun"}
    found |= {"content": [text("It is hot.")]}
    document = {"type": "document", "title": "Sky", "context": "A tale.", "source": plain}
    cited = {"citations": {"enabled": True}}
    content = [text("Read!"), document, found, text("What is red?")]
    paragraphs = "Sky\nA tale.\nThe sun is red.\n\nSun\nhttps://a.b\nIt is hot."
    whole = f"Read!\n\n{paragraphs}\n\nWhat is red?"
    assert counted(content) == counted(whole)
    for index in (1, 2):
        cites = [*content[:index], content[index] | cited, *content[index + 1 :]]
        n_tokens, ignored = counted(cites)
        assert n_tokens == counted(whole)[0] and "citations" in ignored
    assert counted([{"type": "document", "source": parts}]) == counted("The sun\nis red.")
    of_the_tool = {**RESULT, "content": [document, found]}
    assert counted([of_the_tool]) == counted([{**RESULT, "content": paragraphs}])


# --- failures ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/nothing", {"code", "message", "retriable", "correlation_id"}),
        ("/v1/nothing", {"error", "correlation_id"}),
        ("/v1/chat/completions/nothing", {"error", "correlation_id"}),
        ("/v1/messages/nothing", {"type", "error", "request_id"}),
        ("/v1/messagesque", {"error", "correlation_id"}),
        ("/api/blobs/nothing", {"error"}),
    ],
)
def test_a_404_has_the_error_form_of_the_dialect_of_its_path(
    worker: WorkerProcess, path: str, fields: set[str]
) -> None:
    for answer in (worker.get(path), worker.post(path, {})):
        assert answer.status_code == 404 and answer.json().keys() == fields


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/execute", {"code", "message", "retriable", "correlation_id"}),
        ("/v1/inference", {"code", "message", "retriable", "correlation_id"}),
        ("/tokenize", {"error", "correlation_id"}),
        ("/completion", {"error", "correlation_id"}),
        ("/chat/completions", {"error", "correlation_id"}),
        ("/v1/responses", {"error", "correlation_id"}),
        ("/v1/messages", {"type", "error", "request_id"}),
    ],
)
def test_each_operation_refuses_in_the_error_form_of_its_dialect(
    worker: WorkerProcess, path: str, fields: set[str]
) -> None:
    wrong_method = httpx.delete(worker.base_url + path)
    assert wrong_method.status_code == 405 and wrong_method.headers["allow"] == "POST"
    assert "does not accept that method, only POST" in wrong_method.text
    from_a_page = worker.post(path, {}, {"Origin": "https://example.org"})
    assert from_a_page.status_code == 403
    no_object = worker.post(path, [])
    assert no_object.status_code == 400
    for answer in (wrong_method, from_a_page, no_object):
        assert fields <= answer.json().keys()
