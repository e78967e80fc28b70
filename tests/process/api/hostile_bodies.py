"""Request bodies that try to take long, one of each kind.

Bodies of megabytes are bytes, so that encoding them does not delay the observers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.unit.api.test_hostile_schemas import HOSTILE
from worker.api.chat.constrain.keywords import NOT_ENFORCED

MEBIBYTES_4 = 4 * 2**20 - 4096
"""The default of `--max-body-bytes`, minus the text around a long string."""
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = "/v1/chat/completions"
EMOJI = "\\ud83d\\ude00"


Bodies = Iterator[tuple[str, str, Any]]
"""Names, paths and bodies; bodies that are not bytes are encoded."""


def encoded(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def filled(before: str, unit: str, after: str, n_bytes: int = MEBIBYTES_4) -> bytes:
    """A JSON text whose middle is as many units as fit."""
    n = (n_bytes - len(before.encode()) - len(after.encode())) // len(unit.encode())
    return (before + unit * n).encode() + after.encode()


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": FRANCE, "max_tokens": 1, **fields}


def filled_chat(before: str, unit: str, after: str) -> bytes:
    return filled('{"max_tokens":1,"messages":' + before, unit, after)


def forced(schemas: list[Any]) -> dict[str, Any]:
    """A chat that must call a tool; the schemas are those of the tools' parameters."""
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": schema}}
        for i, schema in enumerate(schemas)
    ]
    return chat(tools=tools, tool_choice="required")


def unenforced(n: int) -> dict[str, Any]:
    keywords = dict.fromkeys(sorted(NOT_ENFORCED), {"type": "string"})
    return {
        "type": "object",
        "properties": {f"p{i}": {"type": "array", **keywords} for i in range(n)},
    }


def asked_schema(schema: Any) -> dict[str, Any]:
    return chat(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    )


def _schemas() -> Bodies:
    for name, schema in HOSTILE.items():
        yield f"schema: {name}", CHAT, asked_schema(schema)
    yield "eight forced tools", CHAT, forced([unenforced(120)] * 8)
    yield "forced tools, too many parts", CHAT, forced([unenforced(240)] * 8)
    yield "a thousand forced tools", CHAT, forced([{"type": "object"}] * 1000)
    tool = {"name": "f", "input_schema": unenforced(480)}
    called = {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 1, "messages": FRANCE}
    yield "Anthropic's forced tool", "/v1/messages", {"model": "m", **called}
    form = {"format": {"type": "json_schema", "name": "x", "schema": unenforced(480)}}
    responses = {"input": "x", "text": form, "max_output_tokens": 1}
    yield "Responses' schema", "/v1/responses", responses
    yield "names in a schema", CHAT, asked_schema({"properties": {"x" * 200_000: {"not": {}}}})
    ollama = {"model": "m", "messages": FRANCE, "format": unenforced(480), "stream": False}
    yield "Ollama's format", "/api/chat", ollama
    small: Any = {"properties": {f"p{i}": {"not": {}} for i in range(490)}}
    yield "a small schema", CHAT, asked_schema(small)
    parts: Any = {"anyOf": [{}] * 1990}
    yield "a small schema of many parts", CHAT, asked_schema(parts)
    one_of = {"oneOf": [{"const": i} for i in range(60)]}
    union: Any = {"anyOf": [one_of] * 9}
    yield "a small schema of branches", CHAT, asked_schema(union)
    branch = {"type": "object", "const": {}}
    union = {"anyOf": [{"oneOf": [branch] * 60}] * 30}
    yield "a schema of branches", CHAT, asked_schema(union)
    lists = ",".join(["1"] * 1_000_000)
    yield "a schema as text", CHAT, chat(guided_json=f'{{"enum":[{lists}]}}')
    yield "a schema as text, deep", CHAT, chat(guided_json='{"not":' * 400_000)
    objects = ",".join(["{}"] * 1_000_000)
    yield "a schema as text, objects", CHAT, chat(guided_json=f'{{"enum":[{objects}]}}')
    yield "a grammar", CHAT, chat(grammar='root ::= "' + "a" * 4_000_000)
    yield "an expression", CHAT, chat(guided_regex="(a" * 2_000_000)
    yield "choices", CHAT, chat(guided_choice=["a"] * 250_000)
    yield "choices that are numbers", CHAT, chat(guided_choice=[1] * 250_000)


def _texts() -> Bodies:
    units = {
        "letters": "a",
        "commas": ",",
        "braces": "{",
        "colons": ":",
        "umlauts": "ü",
        "escapes": "\\u00fc",
        "surrogates": EMOJI,
        "quotes": '\\"',
    }
    for name, unit in units.items():
        yield f"a message of {name}", CHAT, filled_chat('[{"role":"user","content":"', unit, '"}]}')
    yield "a prompt", "/v1/completions", filled('{"max_tokens":1,"prompt":"', "fox ", '"}')
    yield "a native prompt", "/v1/inference", filled('{"max_tokens":1,"prompt":"', "fox ", '"}')
    yield "an input", "/v1/responses", filled('{"max_output_tokens":1,"input":"', "fox ", '"}')
    yield "a text to count", "/tokenize", filled('{"content":"', "fox ", '"}')
    for name in ("model", "user", "stop", "role", "suffix", "cache_salt", "x"):
        field = filled(f'{{"max_tokens":1,"prompt":"a","{name}":"', "a", '"}')
        yield f"a long {name}", "/v1/completions", field
    yield "a long name", CHAT, filled('{"max_tokens":1,"', "a", '":1,"messages":[]}')
    content = filled_chat('[{"role":"user","content":"a","', "a", '":1}]}')
    yield "a long name in a message", CHAT, content
    templated = filled('{"messages":[{"role":"user","content":"', "a", '"}]}')
    yield "a rendered text", "/apply-template", templated
    yield "a long number", CHAT, filled('{"messages":[],"seed":', "1", "}")
    wide = ",".join(["9" * 4299] * 940)
    variables = '{"max_tokens":1,"messages":[{"role":"user","content":"a"}],'
    variables += f'"chat_template_kwargs":{{"a":[{wide}]}}}}'
    yield "long numbers", CHAT, variables.encode()
    yield "a long fraction", CHAT, filled('{"messages":[],"temperature":0.', "1", "}")
    yield "blanks", CHAT, filled("{", " ", "}")
    yield "no end", CHAT, filled('{"messages":[{"role":"user","content":"', "a", "")
    yield "no end, quotes", CHAT, filled('{"messages":', '"",', "")
    yield "no UTF-8", CHAT, filled('{"a":"', "a", "") + b"\xff"


def _many() -> Bodies:
    yield "messages", CHAT, chat(messages=FRANCE * 4096)
    yield "too many messages", CHAT, chat(messages=FRANCE * 16_000)
    yield "wrong messages", CHAT, chat(messages=[{"content": 1}] * 16_000)
    part = {"type": "text", "text": "a"}
    parts = chat(messages=[{"role": "user", "content": [part] * 16_000}])
    yield "parts", CHAT, parts
    yield "Anthropic's parts", "/v1/messages", {"model": "m", **parts}
    source = {"type": "text", "media_type": "text/plain", "data": "a" * 128}
    document = {"type": "document", "source": source}
    read = chat(messages=[{"role": "user", "content": [document] * 16_000}])
    yield "Anthropic's documents", "/v1/messages", {"model": "m", **read}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = [{"role": "assistant", "tool_calls": [call] * 250}] * 30
    yield "calls", CHAT, chat(messages=[*FRANCE, *called, *FRANCE])
    results = [{"type": "tool_result", "tool_use_id": "1", "content": "a"}] * 4000
    yield (
        "Anthropic's results",
        "/v1/messages",
        {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": results}]},
    )
    items = [{"type": "function_call_output", "call_id": "1", "output": "a"}] * 16_000
    yield "Responses' items", "/v1/responses", {"input": items, "max_output_tokens": 1}
    for name, text in {
        "names": "{" + ",".join(f'"{i}":1' for i in range(300_000)) + "}",
        "depth": '{"a":' * 480 + "1" + "}" * 480,
    }.items():
        one = {"function": {"name": "f", "arguments": text}}
        body = chat(messages=[*FRANCE, {"role": "assistant", "tool_calls": [one]}, *FRANCE])
        yield f"a call's arguments: {name}", CHAT, body
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}
    tools: list[Any] = [{"type": "function", "function": function}] * 1024
    yield "tools", CHAT, chat(tools=tools)
    yield "too many tools", CHAT, chat(tools=tools * 3)
    yield "ids", "/v1/completions", filled('{"max_tokens":1,"prompt":[5', ",5", "]}", 520_000)
    yield "too many ids", "/v1/completions", filled('{"max_tokens":1,"prompt":[5', ",5", "]}")
    yield "wrong ids", "/detokenize", filled('{"tokens":[-1', ",-1", "]}")
    yield "a few wrong ids", "/detokenize", {"tokens": [-1] * 200_000}
    yield "ids as text", "/detokenize", filled('{"tokens":[5', ",5", "]}", 520_000)
    yield "prompts", "/v1/completions", {"prompt": ["a"] * 257, "max_tokens": 1}
    prompts = {"prompt": [[5] * 1000] * 250, "max_tokens": 1, "echo": True}
    yield "prompts of ids", "/v1/completions", prompts
    yield "inputs", "/v1/embeddings", {"input": ["a"] * 200_000}
    yield "documents", "/v1/rerank", {"query": "a", "documents": ["a"] * 200_000}
    yield "stops", CHAT, chat(stop=["a"] * 200_000)
    yield "biases", CHAT, chat(logit_bias={str(i): 1 for i in range(60_000)})
    yield "fields", CHAT, chat(**{f"field{i}": 1 for i in range(60_000)})
    yield "allowed fields", CHAT, chat(**{f"field{i}": 1 for i in range(250)})
    wrong = {str(i): "x" for i in range(60_000)}
    yield "wrong biases", CHAT, chat(logit_bias=wrong)
    objects = [{"a": 1, "b": 2}] * 16_000
    yield "objects", CHAT, chat(metadata=objects)
    fields = [{**FRANCE[0], **{f"{n}-{i}": 1 for i in range(200)}} for n in range(300)]
    yield "fields of messages", CHAT, chat(messages=fields)
    yield "names", CHAT, chat(metadata={f"name{i}": i for i in range(65_000)})
    yield "too many names", CHAT, chat(metadata={f"name{i}": i for i in range(200_000)})
    yield "values", CHAT, chat(metadata=[1] * 260_000)
    yield "lists", CHAT, chat(metadata=[[]] * 260_000)
    yield "too many values", CHAT, filled('{"a":[1', ",1", "]}")
    yield "too many lists", CHAT, filled('{"a":[[]', ",[]", "]}")
    yield "texts and commas", CHAT, filled('{"a":[""', ',""', "]}")
    yield "depth", CHAT, b'{"a":' * 200_000 + b"1" + b"}" * 200_000
    yield "depth of lists", CHAT, b'{"a":' + b"[" * 4_000_000
    template = {f"name{i}": ["a"] * 4000 for i in range(60)}
    yield "template variables", CHAT, chat(chat_template_kwargs=template)


HOSTILE_BODIES = {
    "schemas and grammars": _schemas,
    "long texts": _texts,
    "many of something": _many,
}


def hostile_bodies(group: str) -> Iterator[tuple[str, str, bytes]]:
    """Yield them one by one, because together they have 200 MB."""
    for name, path, body in HOSTILE_BODIES[group]():
        yield name, path, body if isinstance(body, bytes) else encoded(body)
