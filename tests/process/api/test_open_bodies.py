"""Bodies of OpenAI's clients are accepted: nulls, unknown fields, other servers' names, odd
paths."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.conftest import StartWorker
from tests.support.worker import WorkerProcess

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."


def chat(worker: WorkerProcess, **fields: Any) -> httpx.Response:
    return worker.post("/v1/chat/completions", {"messages": FRANCE, "temperature": 0, **fields})


def content_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"top_p": None, "stop": None, "tools": None, "stream_options": None, "n": None}, None),
        ({"metadata": {"a": "b"}, "store": True}, "metadata, store"),
        ({"user": "", "service_tier": "auto"}, "service_tier"),
        ({"reasoning_effort": "low", "verbosity": "low"}, None),
        ({"functions": [], "prediction": {"type": "content"}}, "prediction"),
        ({"tools": [], "tool_choice": "auto", "parallel_tool_calls": False}, None),
        ({"stream_options": {"include_usage": None, "x": 1}}, "stream_options.x"),
        ({"stop": ["", *(f"<{n}>" for n in range(20))]}, None),
        ({"top_k": -1}, None),
        ({"max_tokens": 32_000}, None),
        ({"max_tokens": -1, "repeat_penalty": 1.0, "cache_salt": "a"}, None),
        ({"model": "gpt-4o"}, None),
        ({"truncate_prompt_tokens": -1, "regex": "", "structured_outputs": {}}, None),
        ({"unknown\r\nx-evil: 1": 1}, "unknown%0D%0Ax-evil%3A%201"),
        ({"größe": 1, "a,b": 1}, "gr%C3%B6%C3%9Fe, a%2Cb"),
    ],
)
def test_bodies_of_usual_clients_are_accepted_and_ignored_fields_named(
    worker: WorkerProcess, fields: dict[str, Any], ignored: str | None
) -> None:
    answer = chat(worker, **fields)
    assert content_of(answer) == PARIS
    assert answer.headers.get("x-ignored-fields") == ignored


def test_the_header_of_ignored_fields_is_bounded_and_says_how_many_more_there_are(
    worker: WorkerProcess,
) -> None:
    inner = {f"property{index}": {"type": "array", "uniqueItems": True} for index in range(480)}
    form = {"type": "json_schema", "json_schema": {"schema": {"properties": inner}}}
    answer = chat(worker, response_format=form, max_tokens=1, **{"x" * 5000: 1})
    assert answer.status_code == 200
    *shown, rest = answer.headers["x-ignored-fields"].split(", ")
    assert shown[0] == "x" * 128 and shown[1].endswith("schema.properties.property0.uniqueItems")
    assert sum(map(len, shown)) < 4096 and rest == f"+{481 - len(shown)} more"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_new_tokens"])
def test_an_error_names_the_alias_that_was_sent(worker: WorkerProcess, name: str) -> None:
    error = chat(worker, **{name: 0}).json()["error"]
    assert error["param"] == name and error["message"].startswith(f"{name} must be")
    many = worker.post("/v1/completions", {"prompt": ["a"] * 1000, "max_tokens": 1})
    assert many.status_code == 400 and many.json()["error"]["param"] == "prompt"


def test_an_empty_schema_is_accepted_and_a_missing_one_refused(worker: WorkerProcess) -> None:
    form: dict[str, Any] = {"type": "json_schema", "schema": {}}
    assert chat(worker, response_format=form, max_tokens=2).status_code == 200
    body = {"input": "hi", "max_output_tokens": 2}
    with_schema = body | {"text": {"format": form | {"name": "x"}}}
    assert worker.post("/v1/responses", with_schema).status_code == 200
    del form["schema"]
    refused = worker.post("/v1/responses", body | {"text": {"format": form}})
    assert refused.status_code == 400 and "needs schema" in refused.json()["error"]["message"]
    assert "schema_" not in refused.text


def test_fields_of_a_completion_that_change_nothing_are_accepted(worker: WorkerProcess) -> None:
    nothing = {"echo": False, "suffix": "", "best_of": None}
    assert worker.post("/v1/completions", {"prompt": "Once", **nothing}).status_code == 200
    both = worker.post("/v1/completions", {"prompt": "Once", "n": 2, "best_of": 2}).json()
    assert len(both["choices"]) == 2


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
TOOL: Any = {"name": "f", "parameters": SCHEMA}
HELLO: Any = {"role": "user", "content": "Hi"}
AS_OPENAI: Any = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
AS_OTHERS: Any = {"type": "json_schema", "schema": SCHEMA}
ANTHROPICS: Any = {"messages": [HELLO], "max_tokens": 9, "output_format": AS_OTHERS}
SEARCH: Any = {"type": "web_search_20260209", "name": "web_search"}
HIT: Any = {"type": "web_search_result", "url": "https://a.b", "encrypted_content": "x"}
SEARCHED: Any = [
    HELLO,
    {"role": "assistant", "content": [
        {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {"query": "a"}},
        {"type": "web_search_tool_result", "tool_use_id": "1", "content": [HIT]},
        {"type": "web_search_tool_result", "tool_use_id": "1", "content": {"error_code": "x"}},
        {"type": "text", "text": "Found."},
    ]},
    HELLO,
]  # fmt: skip
SEARCHED_BY_TOOL: Any = [
    HELLO,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "1", "content": [
            {"type": "web_search_tool_result", "tool_use_id": "2", "content": [HIT]},
            {"type": "text", "text": "Found."},
        ]},
    ]},
]  # fmt: skip
REMOTE: Any = [
    {"type": "mcp_toolset", "mcp_server_name": "a"},
    {"type": "advisor_20260301", "name": "advisor", "model": "b"},
]
OF_REMOTE: Any = {"type": "mcp_toolset_reference", "server_name": "a"}
REMOTE_CHANGE: Any = {"role": "system", "content": [{"type": "tool_removal", "tool": OF_REMOTE}]}
OLLAMAS: Any = {"prompt": "Hi", "stream": False, "options": {"num_predict": 1}}


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        ("/completion", {"prompt": "a", "grammar": 'root ::= "b"', "json_schema": SCHEMA},
         "json_schema"),
        ("/v1/completions", {"prompt": "a", "guided_regex": "b",
                             "structured_outputs": {"choice": ["c"]}}, "structured_outputs.choice"),
        ("/v1/chat/completions", {"messages": [HELLO], "max_tokens": 9, "grammar": 'root ::= "b"',
                                  "response_format": AS_OPENAI}, "grammar"),
        ("/v1/chat/completions", {"messages": [HELLO], "max_tokens": 9, "tool_choice": "required",
                                  "tools": [{"type": "function", "function": TOOL}],
                                  "response_format": AS_OPENAI}, "response_format.json_schema"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 9, "tool_choice": "required",
                           "tools": [{"type": "function", **TOOL}],
                           "text": {"format": {**AS_OTHERS, "name": "x"}}}, "text.format"),
        ("/v1/messages", {**ANTHROPICS, "output_config": {"format": AS_OTHERS}}, "output_format"),
        ("/v1/messages", {**ANTHROPICS, "tool_choice": {"type": "any"},
                          "tools": [{"name": "f", "input_schema": SCHEMA}]}, "output_format"),
        ("/v1/messages", {"messages": SEARCHED, "max_tokens": 9, "tools": [SEARCH]},
         "tools.web_search_20260209, messages.server_tool_use, messages.web_search_tool_result"),
        ("/v1/messages", {"messages": [HELLO], "max_tokens": 9, "tools": REMOTE},
         "tools[].mcp_server_name, tools[].model, tools.mcp_toolset, tools.advisor_20260301"),
        ("/v1/messages", {"messages": SEARCHED_BY_TOOL, "max_tokens": 9},
         "messages.web_search_tool_result"),
        ("/v1/messages", {"messages": [HELLO, REMOTE_CHANGE], "max_tokens": 9},
         "messages.mcp_toolset_reference"),
        ("/v1/responses", {"input": [HELLO, {"type": "web_search_call", "status": "completed"}],
                           "max_output_tokens": 9}, "input.web_search_call"),
        ("/api/generate", {**OLLAMAS, "raw": True, "think": True}, "think"),
        ("/api/generate", {**OLLAMAS, "top_logprobs": 2}, "top_logprobs"),
    ],
)  # fmt: skip
def test_a_field_without_effect_beside_another_is_named_as_ignored(
    worker: WorkerProcess, path: str, fields: dict[str, Any], ignored: str
) -> None:
    """Only the first of several formats counts; a forced call has its own; a raw prompt has no
    reasoning."""
    answer = worker.post(path, {"model": "m", **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-ignored-fields") == ignored


def test_a_format_holds_in_completions_as_in_chats(worker: WorkerProcess) -> None:
    for form in (AS_OPENAI, AS_OTHERS, {"type": "json_object"}):
        fields = {"prompt": "Once", "max_tokens": 99, "temperature": 0, "response_format": form}
        answer = worker.post("/v1/completions", fields)
        assert "x-ignored-fields" not in answer.headers
        text = answer.json()["choices"][0]["text"]
        assert text.lstrip().startswith("{"), text


def test_a_stop_ends_a_response(worker: WorkerProcess) -> None:
    body = {"input": "What is the capital of France?", "temperature": 0}
    answer = worker.post("/v1/responses", {**body, "stop": " of"}).json()
    assert answer["output"][0]["content"][0]["text"] == "The capital"


def test_unknown_fields_of_a_replayed_message_are_ignored_by_name(worker: WorkerProcess) -> None:
    part = {"type": "text", "text": "What is the capital of France?", "cache_control": {}}
    message = {"role": "user", "content": [part], "index": 0, "refusal": None, "audio": None}
    answer = worker.post("/v1/chat/completions", {"messages": [message], "temperature": 0})
    assert content_of(answer) == PARIS
    ignored = answer.headers["x-ignored-fields"]
    assert ignored == "messages[].index, messages[].content[].cache_control"


def test_text_parts_are_joined_by_a_line_break(worker: WorkerProcess) -> None:
    parts = [{"type": "text", "text": text} for text in ("One", "two")]
    body = {"messages": [{"role": "user", "content": parts}, {"role": "assistant"}]}
    prompt = worker.post("/apply-template", body).json()["prompt"]
    assert "One\ntwo" in prompt and "None" not in prompt


def test_max_completion_tokens_wins_over_max_tokens(worker: WorkerProcess) -> None:
    answer = chat(worker, max_tokens=5, max_completion_tokens=2).json()
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["choices"][0]["finish_reason"] == "length"
    assert chat(worker, n_predict=3).json()["usage"]["completion_tokens"] == 3


def test_a_limit_beyond_the_context_ends_with_length(worker: WorkerProcess) -> None:
    body = {"prompt": [0, *[374] * 1000], "max_tokens": 100_000, "ignore_eos": True}
    answer = worker.post("/v1/completions", body).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 1025


def test_a_byte_order_mark_and_a_trailing_slash_are_accepted(worker: WorkerProcess) -> None:
    body = b'\xef\xbb\xbf{"prompt": "Once", "max_tokens": 1}'
    url = f"{worker.base_url}/v1/completions/"
    json = {"Content-Type": "application/json; charset=utf-8"}
    assert httpx.post(url, content=body, headers=json).status_code == 200
    assert worker.get("/v1/models/").status_code == 200


@pytest.fixture(scope="module")
def strict(share_worker: StartWorker) -> WorkerProcess:
    """A worker with `--strict` and two names."""
    return share_worker("--strict", "--served-model-name", "a", "--served-model-name", "b")


def test_strict_refuses_unknown_fields_by_name(strict: WorkerProcess) -> None:
    answer = chat(strict, metadata={}, store=False)
    assert answer.status_code == 400
    assert [e["field"] for e in answer.json()["error"]["errors"]] == ["metadata", "store"]


def test_a_model_has_only_its_served_names(strict: WorkerProcess) -> None:
    assert chat(strict, model="b").json()["model"] == "a"
    assert [entry["id"] for entry in strict.get("/v1/models").json()["data"]] == ["a", "b"]
    assert strict.get("/v1/models/b").json()["id"] == "b"
    missing = chat(strict, model="tiny-model")
    assert "'a' or 'b'" in missing.json()["error"]["message"]
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    assert missing.json()["error"]["param"] == "model"


LOOK = {"type": "object", "properties": {"where": {"enum": ["up", "down"]}}, "required": ["where"]}
LOOK_UP = [{"role": "user", "content": "Look!"}]


def test_a_message_may_be_sent_back_under_strict(strict: WorkerProcess) -> None:
    body = {"model": "a", "messages": LOOK_UP, "max_tokens": 300, "temperature": 0}
    body |= {"tools": [{"name": "look", "input_schema": LOOK}]}
    [use] = strict.answer("/v1/messages", body | {"tool_choice": {"type": "any"}})["content"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "is_error": False, "content": "a"}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    turns = [
        *LOOK_UP,
        {"role": "assistant", "content": [thought, use]},
        {"role": "user", "content": [result]},
    ]
    strict.answer("/v1/messages", body | {"messages": turns, "max_tokens": 2})


def test_a_responses_output_may_be_sent_back_under_strict(strict: WorkerProcess) -> None:
    body = {"input": FRANCE, "max_output_tokens": 4, "temperature": 0}
    output = strict.answer("/v1/responses", body)["output"]
    function = {"type": "function", "name": "look", "parameters": LOOK}
    forced = {"input": "Look!", "tools": [function], "tool_choice": "required"}
    calls = strict.answer("/v1/responses", forced)["output"]
    reasoning = {
        **{"type": "reasoning", "id": "rs_1", "status": "completed", "summary": []},
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "a"}
        for call in calls
    ]
    turns = [*FRANCE, *output, *FRANCE, reasoning, *calls, *results]
    strict.answer("/v1/responses", body | {"input": turns})


def test_a_message_of_ollamas_chat_may_be_sent_back_under_strict(strict: WorkerProcess) -> None:
    used: dict[str, Any] = {"index": 0, "name": "look", "arguments": {}}
    turns = [
        *LOOK_UP,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": used}]},
        {"role": "tool", "tool_name": "look", "content": "a"},
    ]
    body = {"model": "a", "messages": turns, "options": {"num_predict": 2}, "stream": False}
    strict.answer("/api/chat", body)
    used["index"] = "first"  # none of it is read
    turns[-1] = {"role": "tool", "tool_call_id": "c", "content": "a"}
    strict.answer("/v1/chat/completions", {"messages": turns, "max_tokens": 2})


def test_the_last_chunk_has_timings(worker: WorkerProcess) -> None:
    body = {"messages": FRANCE, "temperature": 0, "stream": True}
    lines = worker.post("/v1/chat/completions", body).text.split("\n\n")
    assert lines[-2] == "data: [DONE]" and '"timings":{' in lines[-3]
    timings = chat(worker).json()["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == 16 and timings["predicted_n"] > 4
    assert timings["predicted_per_second"] > 0


def test_a_late_head_changes_no_successful_stream(worker: WorkerProcess) -> None:
    late = {"x-llorch-late-head": "1"}
    for path, body in (
        ("/v1/inference/stream", {"prompt": "Once", "max_tokens": 3, "seed": 1}),
        ("/v1/completions", {"prompt": ["A", "B"], "max_tokens": 3, "seed": 1, "stream": True}),
    ):
        answer, usual = worker.post(path, body, late), worker.post(path, body)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/ev")
        assert answer.text.count("\n\n") == usual.text.count("\n\n")


def test_props_and_slots_describe_the_worker(worker: WorkerProcess) -> None:
    props = worker.get("/props").json()
    assert props["total_slots"] == 16
    assert props["model_alias"] == props["model_path"] == "tiny-model"
    slots = worker.get("/slots").json()
    assert len(slots) == 16 and not any(slot["is_processing"] for slot in slots)
