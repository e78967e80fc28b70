"""Reasoning and calls as a started worker sends them. A pattern forces the model's output, so that
the whole path from its tokens to the client is real."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import StartWorker
from tests.support.bundled import ASSET, bundled_with_template
from tests.support.scripted_api import ScriptedFactory, story
from tests.support.worker import WorkerProcess

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
OWN = json.loads((ASSET / "tokenizer_config.json").read_text())["chat_template"]
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the (sea)"}}\n</tool_call>'


def says(worker: WorkerProcess, text: str, **fields: Any) -> Any:
    """Return the message of an answer whose output is this text."""
    pattern = re.escape(text).replace(r"\ ", " ").replace("\\\n", r"\n")
    body = {"messages": FRANCE, "max_tokens": 200, "guided_regex": pattern, **fields}
    (choice,) = worker.post("/v1/chat/completions", body).json()["choices"]
    return choice["message"] | {"finish_reason": choice["finish_reason"]}


def test_calls_are_found_in_a_model_whose_template_takes_no_tools(worker: WorkerProcess) -> None:
    assert worker.get("/info").json()["model"]["template_takes_tools"] is False
    message = says(worker, f"<think>hm</think>I look.\n{CALL}", tools=[LOOK])
    assert message["content"] == "I look." and message["reasoning_content"] == "hm"
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"at": "the (sea)"}
    assert message["finish_reason"] == "tool_calls"


def test_reasoning_is_left_out_on_request(worker: WorkerProcess) -> None:
    body = {"messages": FRANCE, "guided_regex": "<think>hm</think>Yes\\.", "max_tokens": 99}
    for fields in ({"stream": True}, {}):
        without_reasoning = {**body, **fields, "include_reasoning": False}
        answer = worker.post("/v1/chat/completions", without_reasoning)
        assert "x-ignored-fields" not in answer.headers and "reasoning_content" not in answer.text
    (choice,) = answer.json()["choices"]
    assert choice["message"]["content"] == "Yes."
    assert answer.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_a_stop_counts_in_the_reasoning_too(worker: WorkerProcess) -> None:
    """As in llama-server, which looks for it in the model's whole output."""
    message = says(worker, "<think>one, two</think>three, four", stop=[","])
    assert (message["reasoning_content"], message["content"]) == ("one", "")
    assert message["finish_reason"] == "stop"


def test_functions_and_results_are_in_the_prompt_of_any_template(worker: WorkerProcess) -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "blue"}
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [*FRANCE, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    body = {"messages": messages, "tools": [LOOK]}
    prompt = worker.post("/apply-template", body).json()["prompt"]
    assert '"name": "look"' in prompt and "<tool_response>\nblue\n</tool_response>" in prompt
    assert prompt.count("<tool_call>\n") == 2
    assert worker.answer("/v1/chat/completions", body | {"max_tokens": 5})["choices"]


def test_reasoning_that_the_template_begins_continues_across_cuts(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    template = OWN + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
    model = bundled_with_template(tmp_path / "thinks.gguf", template)
    worker = start_worker("--model", str(model))
    body = {"messages": FRANCE, "temperature": 0, "max_tokens": 8}
    (choice,) = worker.post("/v1/chat/completions", body).json()["choices"]
    thought = choice["message"]["reasoning_content"]
    assert thought and choice["message"]["content"] == ""
    # A constrained answer comes after the block, which is not closed here.
    forced = body | {"response_format": {"type": "json_object"}}
    (choice,) = worker.post("/v1/chat/completions", forced).json()["choices"]
    assert choice["message"]["reasoning_content"] == thought
    assert choice["message"]["content"] == "" and choice["finish_reason"] == "length"
    # After a cut in the middle it continues as if uncut, even before constrained output.
    for request in (body, forced):
        (cut,) = worker.post("/v1/chat/completions", request | {"max_tokens": 4}).json()["choices"]
        so_far = cut["message"] | {"content": ""}
        assert thought.startswith(so_far["reasoning_content"]) and so_far["reasoning_content"]
        goes_on = {"messages": [*FRANCE, so_far], "continue_final_message": True}
        (rest,) = worker.post("/v1/chat/completions", request | goes_on | {"max_tokens": 4}).json()[
            "choices"
        ]
        assert so_far["reasoning_content"] + rest["message"]["reasoning_content"] == thought
        assert rest["message"]["content"] == ""
    # If it is not separated, it is text, without a mark that the model did not write.
    request = body | goes_on | {"max_tokens": 4, "reasoning_format": "none"}
    (rest,) = worker.post("/v1/chat/completions", request).json()["choices"]
    assert so_far["reasoning_content"] + rest["message"]["content"] == thought
    # A string selects what is continued.
    thought = so_far["reasoning_content"]
    both = {"messages": [*FRANCE, so_far | {"content": "Paris is"}]}
    for word, end in (("content", "Paris is"), (True, "Paris is"), ("reasoning_content", thought)):
        request = both | {"continue_final_message": word}
        assert worker.post("/apply-template", request).json()["prompt"].endswith(end)
    assert worker.post("/apply-template", both | {"continue_final_message": "x"}).status_code == 400


def test_reasoning_none_leaves_the_reasoning_in_the_text(scripted: ScriptedFactory) -> None:
    worker = scripted(reasoning="none")
    worker.supervisor.script = story("<think>\nh", "m\n</think>\n\nParis.")
    answer = httpx.post(f"{worker.base_url}/v1/chat/completions", json={"messages": FRANCE}).json()
    (message,) = (choice["message"] for choice in answer["choices"])
    assert message["content"] == "<think>\nhm\n</think>\n\nParis."
    assert "reasoning_content" not in message


def test_each_dialect_with_a_field_for_it_counts_the_tokens_of_reasoning(
    scripted: ScriptedFactory,
) -> None:
    worker = scripted()
    worker.supervisor.script = story("<think>\nh", "m\n</think>", "\n\nParis.")
    for path, body, details in (
        ("chat/completions", {"messages": FRANCE}, ("completion_tokens", "reasoning_tokens")),
        ("responses", {"input": FRANCE}, ("output_tokens", "reasoning_tokens")),
        ("messages", {"messages": FRANCE, "max_tokens": 9}, ("output_tokens", "thinking_tokens")),
    ):
        usage = httpx.post(f"{worker.base_url}/v1/{path}", json=body).json()["usage"]
        assert usage[f"{details[0]}_details"][details[1]] == 2, path
