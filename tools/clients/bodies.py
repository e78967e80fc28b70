"""Bodies as sent by editors, home hubs, routers and evaluators, over plain HTTP.

Written after the public source of each; a body has the fields that the client sends by default.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

from tools.clients.actions import Server, action
from tools.clients.asked import USER

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "HassTurnOn",
        "description": "Turns on a device",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}},
                       "required": []},
    },
}  # fmt: skip


def post(server: Server, path: str, body: Any, **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(server.url + path, json=body, headers=names, timeout=50, trust_env=False)


def accepted(client: str, path: str, name: str, body: Any, model: Any = "instruct") -> None:
    @action(client, f"{path}: {name}", model)
    def run(server: Server) -> None:
        named = {"model": server.model} if "model" in body else {}
        response = post(server, path, body | named)
        assert response.status_code == 200, response.text[:300]
        if body.get("stream"):
            assert response.text.rstrip().endswith("data: [DONE]") or (
                _last_event(response.text)["type"] in ("response.completed", "response.incomplete")
            ), response.text[-200:]


def _last_event(stream: str) -> Any:
    return json.loads(stream.rstrip().rpartition("data: ")[2])


CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
accepted("cline", CHAT, "a coding turn", {
    "model": "local", "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
    "max_tokens": 24, "messages": [
        {"role": "system", "content": "You are Cline."},
        {"role": "user", "content": [{"type": "text", "text": "<task>\nhi\n</task>"},
                                     {"type": "text", "text": "<environment/>"}]}],
})  # fmt: skip
accepted("continue", CHAT, "a chat turn", {
    "model": "local", "messages": USER, "max_tokens": 24, "stream": True, "temperature": 0.5,
    "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "stop": ["<|im_end|>"],
})  # fmt: skip
accepted("continue", "/v1/completions", "an autocompletion", {
    "model": "local", "prompt": "def add(a, b):\n    return", "max_tokens": 16, "stream": True,
    "temperature": 0.01, "stop": ["\n\n", "```", "<fim_prefix>", "<fim_suffix>", "/src/"],
})  # fmt: skip
accepted("zed", CHAT, "an assistant turn", {
    "model": "local", "messages": USER, "stream": True, "max_completion_tokens": 24, "stop": [],
    "temperature": 1.0, "tool_choice": None, "parallel_tool_calls": None, "tools": [],
    "prompt_cache_key": None, "reasoning_effort": None,
})  # fmt: skip
accepted("home-assistant", CHAT, "a voice command with tools", {
    "model": "local", "messages": [{"role": "system", "content": "You control a home."}, *USER],
    "tools": [TOOL], "max_tokens": 150, "top_p": 1.0, "temperature": 1.0,
    "user": "01J8", "stream": True,
}, "bundled")  # fmt: skip
HASS_ARGUMENTS: Any = {
    "max_output_tokens": 24, "top_p": 1.0, "temperature": 1.0, "user": "01J8", "store": False,
    "stream": True, "model": "local", "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"], "text": {"verbosity": "medium"},
    "tools": [{"type": "function", **TOOL["function"], "strict": False},
              {"type": "web_search_preview", "search_context_size": "medium"}],
}  # fmt: skip
HASS_INPUT: Any = [
    {"type": "message", "role": "developer", "content": "You control a home."},
    {"type": "message", "role": "user", "content": "Turn on the light."},
]
accepted("home-assistant", RESPONSES, "a voice command", HASS_ARGUMENTS | {"input": HASS_INPUT},
         "bundled")  # fmt: skip
accepted("home-assistant", RESPONSES, "after the call of a tool", HASS_ARGUMENTS | {"input": [
    *HASS_INPUT,
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
    {"type": "function_call", "name": "HassTurnOn", "arguments": '{"name": "light"}',
     "call_id": "call_1"},
    {"type": "function_call_output", "call_id": "call_1", "output": '{"success": true}'},
]}, "bundled")  # fmt: skip
accepted("home-assistant", RESPONSES, "data for a task", HASS_ARGUMENTS | {
    "input": HASS_INPUT, "tools": [], "max_output_tokens": 200, "text": {"format": {
        "type": "json_schema", "name": "task", "schema": {
            "type": "object", "strict": True, "additionalProperties": False,
            "required": ["name", "count"], "properties": {
                "name": {"type": "string", "description": "of the device"},
                "count": {"type": ["integer", "null"]}}}}}}, "bundled")  # fmt: skip
accepted("zed", RESPONSES, "an assistant turn", {
    "model": "local", "stream": True, "temperature": 1.0, "max_output_tokens": 24,
    "parallel_tool_calls": False, "prompt_cache_key": "thread-1", "input": [
        {"type": "message", "role": "system", "content": [
            {"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "Hello.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "read_file", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [
            {"type": "input_text", "text": "main"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And?"}]}],
    "tools": [{"type": "function", "name": "read_file", "description": "Reads a file",
               "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}],
    "reasoning": {"effort": "medium"}}, "bundled")  # fmt: skip
accepted("zed", CHAT, "a turn after the call of a tool", {
    "model": "local", "stream": True, "stream_options": {"include_usage": True},
    "max_completion_tokens": 24, "tool_choice": "auto", "reasoning_effort": "low", "messages": [
        *USER,
        {"role": "assistant", "content": None, "reasoning_content": "Let me see.", "tool_calls": [
            {"id": "c1", "type": "function", "function": {
                "name": "HassTurnOn", "arguments": '{"name": "x"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "done"}]}],
    "tools": [TOOL]}, "bundled")  # fmt: skip
accepted("cline", CHAT, "a turn with its tools", {
    "model": "local", "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
    "max_tokens": 24, "tools": [TOOL], "messages": [
        {"role": "system", "content": "You are Cline."}, *USER,
        {"role": "assistant", "content": " ", "tool_calls": [{
            "id": "c1", "type": "function", "function": {
                "name": "HassTurnOn", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "user", "content": [{"type": "text", "text": "go on"}]}]}, "bundled")  # fmt: skip
accepted("continue", CHAT, "an edit with a prediction", {
    "model": "local", "messages": USER, "max_tokens": 24, "stream": True, "temperature": 0.01,
    "prediction": {"type": "content", "content": "def add(a, b):"},
    "tools": [{**TOOL, "function": {**TOOL["function"], "strict": None}}]})  # fmt: skip
accepted("open-webui", CHAT, "a chat", {
    "stream": True, "model": "local", "messages": USER, "max_tokens": 24, "metadata": {},
    "chat_id": "c", "id": "m1", "session_id": "s", "features": {"web_search": False},
    "variables": {"{{USER_NAME}}": "u"}, "background_tasks": {"title_generation": True},
})  # fmt: skip
accepted("librechat", CHAT, "a chat", {
    "model": "local", "messages": USER, "stream": True, "user": "65f", "max_tokens": 24,
    "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "temperature": 1,
})  # fmt: skip
accepted("sillytavern", "/v1/completions", "a text completion", {
    "prompt": "Once upon", "model": "local", "max_new_tokens": 12, "max_tokens": 12,
    "temperature": 1, "top_p": 1, "typical_p": 1, "typical": 1, "sampler_seed": -1, "min_p": 0.1,
    "repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0, "top_k": 0, "skew": 0,
    "min_tokens": 0, "length_penalty": 1, "early_stopping": False, "add_bos_token": True,
    "dynamic_temperature": False, "dynatemp_low": 1, "dynatemp_high": 1, "mirostat_mode": 0,
    "ban_eos_token": False, "skip_special_tokens": True, "top_a": 0, "tfs": 1, "n_probs": 0,
    "stop": ["\nUser:"], "stopping_strings": ["\nUser:"], "truncation_length": 2048,
    "include_reasoning": True, "stream": True,
})  # fmt: skip
accepted(
    "llama.cpp", "/chat/completions", "the path without /v1", {"messages": USER, "max_tokens": 4}
)
accepted("llama.cpp", "/completions", "the path without /v1", {"prompt": "One", "max_tokens": 4})
accepted("llama.cpp", CHAT, "no model", {"messages": USER, "max_tokens": 4})
accepted("llama.cpp", CHAT, "a trailing slash of the base", {"messages": USER, "max_tokens": 4})
accepted("llama.cpp", CHAT, "max_tokens -1 and a stop", {
    "messages": [{"role": "system", "content": "You are a helpful assistant."}, *USER],
    "max_tokens": -1, "stop": ["."], "temperature": 0})  # fmt: skip
accepted("llama.cpp", CHAT, "a grammar",
         {"messages": USER, "max_tokens": 8, "grammar": 'root ::= "yes" | "no"'})  # fmt: skip
accepted("llama.cpp", CHAT, "json_schema",
         {"messages": USER, "max_tokens": 60, "json_schema": {"type": "object", "properties": {
             "a": {"type": "boolean"}}, "required": ["a"]}})  # fmt: skip
accepted("llama.cpp", CHAT, "response_format with a bare schema",
         {"messages": USER, "max_tokens": 60, "response_format": {"type": "json_object", "schema": {
             "type": "object", "properties": {"a": {"type": "boolean"}}}}})  # fmt: skip
accepted("vllm", CHAT, "guided_choice",
         {"messages": USER, "max_tokens": 8, "guided_choice": ["red", "blue"]})  # fmt: skip
accepted("vllm", CHAT, "guided_regex",
         {"messages": USER, "max_tokens": 8, "guided_regex": "[0-9]{3}"})  # fmt: skip
accepted("vllm", CHAT, "structured_outputs",
         {"messages": USER, "max_tokens": 8,
          "structured_outputs": {"choice": ["red", "blue"]}})  # fmt: skip
accepted("vllm", CHAT, "continue_final_message", {
    "messages": [*USER, {"role": "assistant", "content": "The capital is"}], "max_tokens": 4,
    "continue_final_message": True, "add_generation_prompt": False})  # fmt: skip
accepted("lm-eval", "/v1/completions", "local-completions' loglikelihood", {
    "prompt": [[1, 2, 3, 4]], "model": "m", "max_tokens": 1, "logprobs": 1, "seed": 1234,
    "echo": True, "temperature": 0})  # fmt: skip
accepted("lm-eval", "/v1/completions", "local-completions' generate_until", {
    "prompt": ["Once"], "model": "m", "max_tokens": 8, "temperature": 0, "stop": ["\n\n"],
    "seed": 1234})  # fmt: skip
accepted("guidellm", CHAT, "a load request", {
    "model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_completion_tokens": 8, "stop": None, "ignore_eos": True})  # fmt: skip
accepted("promptfoo", CHAT, "a check", {
    "model": "m", "messages": USER, "max_tokens": 8, "temperature": 0, "seed": None})  # fmt: skip


@action("llama.cpp", "a body with a byte order mark")
def byte_order_mark(server: Server) -> None:
    body = b"\xef\xbb\xbf" + json.dumps({"messages": USER, "max_tokens": 4}).encode()
    headers = {"content-type": "application/json"}
    response = httpx.post(server.url + CHAT, content=body, headers=headers, timeout=50)
    assert response.status_code == 200, response.text[:300]


@action("llama-swap", "timings in the last chunk")
def timings(server: Server) -> None:
    body = {"messages": USER, "max_tokens": 6, "stream": True}
    lines = post(server, CHAT, body).text.split("\n\n")
    chunks = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
    assert chunks[-1]["timings"]["predicted_n"] > 0


@action("llama.cpp", "/props and /slots")
def props(server: Server) -> None:
    assert httpx.get(server.url + "/props", timeout=10).json()["total_slots"] >= 1
    assert isinstance(httpx.get(server.url + "/slots", timeout=10).json(), list)


@action("kserve", "/v2/health/live and ready")
def kserve(server: Server) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v1/health", "/health"):
        assert httpx.get(server.url + path, timeout=10).status_code == 200, path


@action("llm-d", "vLLM's names on /metrics")
def vllm_metrics(server: Server) -> None:
    text = httpx.get(server.url + "/metrics", timeout=10).text
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert f"vllm:{name}" in text, name


@action("litellm", "/v1/rerank answers or says why not")
def rerank(server: Server) -> None:
    body = {"model": "m", "query": "q", "documents": ["a", "b"]}
    response = post(server, "/v1/rerank", body)
    assert response.status_code == 200 or "error" in response.json()
    assert response.status_code != 404


@action("browser", "/tokenize with pieces")
def pieces(server: Server) -> None:
    found = post(server, "/tokenize", {"content": "Hello you", "with_pieces": True}).json()
    assert found["tokens"][0]["piece"]
