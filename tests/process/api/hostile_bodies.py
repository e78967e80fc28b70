"""Bodies of requests that were made to take long, one for each way.

Bodies of megabytes are bytes, so that encoding them holds nobody up who watches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tests.unit.api.test_hostile_schemas import HOSTILE
from worker.api.chat.constrain.keywords import NOT_ENFORCED

MEBIBYTES_4 = 4 * 2**20 - 4096
"""The default of `--max-body-bytes`, less what stands around a long text."""
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = "/v1/chat/completions"
EMOJI = "\\ud83d\\ude00"


class HostileBody(NamedTuple):
    name: str
    path: str
    body: bytes


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
    """A chat that must call a tool; the schemas are of the tools' parameters."""
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


def _schemas() -> Iterator[HostileBody]:
    for name, schema in HOSTILE.items():
        yield HostileBody(f"schema: {name}", CHAT, encoded(asked_schema(schema)))
    yield HostileBody("eight forced tools", CHAT, encoded(forced([unenforced(120)] * 8)))
    yield HostileBody("forced tools, too many parts", CHAT, encoded(forced([unenforced(240)] * 8)))
    yield HostileBody("a thousand forced tools", CHAT, encoded(forced([{"type": "object"}] * 1000)))
    tool = {"name": "f", "input_schema": unenforced(480)}
    called = {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 1, "messages": FRANCE}
    yield HostileBody("Anthropic's forced tool", "/v1/messages", encoded({"model": "m", **called}))
    form = {"format": {"type": "json_schema", "name": "x", "schema": unenforced(480)}}
    responses = {"input": "x", "text": form, "max_output_tokens": 1}
    yield HostileBody("Responses' schema", "/v1/responses", encoded(responses))
    yield HostileBody(
        "names in a schema",
        CHAT,
        encoded(asked_schema({"properties": {"x" * 200_000: {"not": {}}}})),
    )
    ollama = {"model": "m", "messages": FRANCE, "format": unenforced(480), "stream": False}
    yield HostileBody("Ollama's format", "/api/chat", encoded(ollama))
    small: Any = {"properties": {f"p{i}": {"not": {}} for i in range(490)}}
    yield HostileBody("a small schema", CHAT, encoded(asked_schema(small)))
    parts: Any = {"anyOf": [{}] * 1990}
    yield HostileBody("a small schema of many parts", CHAT, encoded(asked_schema(parts)))
    one_of = {"oneOf": [{"const": i} for i in range(60)]}
    union: Any = {"anyOf": [one_of] * 9}
    yield HostileBody("a small schema of branches", CHAT, encoded(asked_schema(union)))
    branch = {"type": "object", "const": {}}
    union = {"anyOf": [{"oneOf": [branch] * 60}] * 30}
    yield HostileBody("a schema of branches", CHAT, encoded(asked_schema(union)))
    lists = ",".join(["1"] * 1_000_000)
    yield HostileBody("a schema as text", CHAT, encoded(chat(guided_json=f'{{"enum":[{lists}]}}')))
    yield HostileBody(
        "a schema as text, deep", CHAT, encoded(chat(guided_json='{"not":' * 400_000))
    )
    objects = ",".join(["{}"] * 1_000_000)
    yield HostileBody(
        "a schema as text, objects", CHAT, encoded(chat(guided_json=f'{{"enum":[{objects}]}}'))
    )
    yield HostileBody("a grammar", CHAT, encoded(chat(grammar='root ::= "' + "a" * 4_000_000)))
    yield HostileBody("an expression", CHAT, encoded(chat(guided_regex="(a" * 2_000_000)))
    yield HostileBody("choices", CHAT, encoded(chat(guided_choice=["a"] * 250_000)))
    yield HostileBody("choices that are numbers", CHAT, encoded(chat(guided_choice=[1] * 250_000)))


def _texts() -> Iterator[HostileBody]:
    units = {
        "letters": "a",
        "words": "fox ",
        "commas": ",",
        "braces": "{",
        "colons": ":",
        "umlauts": "ü",
        "emoji": "😀",
        "escapes": "\\u00fc",
        "surrogates": EMOJI,
        "line ends": "\\n",
        "quotes": '\\"',
        "control tokens": "<|im_end|>",
    }
    for name, unit in units.items():
        yield HostileBody(
            f"a message of {name}", CHAT, filled_chat('[{"role":"user","content":"', unit, '"}]}')
        )
    yield HostileBody(
        "a prompt", "/v1/completions", filled('{"max_tokens":1,"prompt":"', "fox ", '"}')
    )
    yield HostileBody(
        "a native prompt", "/v1/inference", filled('{"max_tokens":1,"prompt":"', "fox ", '"}')
    )
    yield HostileBody(
        "an input", "/v1/responses", filled('{"max_output_tokens":1,"input":"', "fox ", '"}')
    )
    yield HostileBody("a text to count", "/tokenize", filled('{"content":"', "fox ", '"}'))
    for name in ("model", "user", "stop", "role", "suffix", "cache_salt", "x"):
        field = filled(f'{{"max_tokens":1,"prompt":"a","{name}":"', "a", '"}')
        yield HostileBody(f"a long {name}", "/v1/completions", field)
    yield HostileBody("a long name", CHAT, filled('{"max_tokens":1,"', "a", '":1,"messages":[]}'))
    content = filled_chat('[{"role":"user","content":"a","', "a", '":1}]}')
    yield HostileBody("a long name in a message", CHAT, content)
    templated = filled('{"messages":[{"role":"user","content":"', "a", '"}]}')
    yield HostileBody("a rendered text", "/apply-template", templated)
    yield HostileBody("a long number", CHAT, filled('{"messages":[],"seed":', "1", "}"))
    yield HostileBody("a long fraction", CHAT, filled('{"messages":[],"temperature":0.', "1", "}"))
    yield HostileBody("blanks", CHAT, filled("{", " ", "}"))
    yield HostileBody("no end", CHAT, filled('{"messages":[{"role":"user","content":"', "a", ""))
    yield HostileBody("no end, quotes", CHAT, filled('{"messages":', '"",', ""))
    yield HostileBody("no UTF-8", CHAT, filled('{"a":"', "a", "") + b"\xff")


def _many() -> Iterator[HostileBody]:
    yield HostileBody("messages", CHAT, encoded(chat(messages=FRANCE * 4096)))
    yield HostileBody("too many messages", CHAT, encoded(chat(messages=FRANCE * 16_000)))
    yield HostileBody("wrong messages", CHAT, encoded(chat(messages=[{"content": 1}] * 16_000)))
    part = {"type": "text", "text": "a"}
    parts = chat(messages=[{"role": "user", "content": [part] * 16_000}])
    yield HostileBody("parts", CHAT, encoded(parts))
    yield HostileBody("Anthropic's parts", "/v1/messages", encoded({"model": "m", **parts}))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = [{"role": "assistant", "tool_calls": [call] * 250}] * 30
    yield HostileBody("calls", CHAT, encoded(chat(messages=[*FRANCE, *called, *FRANCE])))
    results = [{"type": "tool_result", "tool_use_id": "1", "content": "a"}] * 4000
    yield HostileBody(
        "Anthropic's results",
        "/v1/messages",
        encoded(
            {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": results}]}
        ),
    )
    items = [{"type": "function_call_output", "call_id": "1", "output": "a"}] * 16_000
    yield HostileBody(
        "Responses' items", "/v1/responses", encoded({"input": items, "max_output_tokens": 1})
    )
    for name, text in {
        "numbers": "[" + "1," * 1_000_000 + "1]",
        "objects": "[" + "{}," * 1_000_000 + "{}]",
        "names": "{" + ",".join(f'"{i}":1' for i in range(300_000)) + "}",
        "no end": "[" * 2_000_000,
        "depth": '{"a":' * 480 + "1" + "}" * 480,
    }.items():
        one = {"function": {"name": "f", "arguments": text}}
        body = chat(messages=[*FRANCE, {"role": "assistant", "tool_calls": [one]}, *FRANCE])
        yield HostileBody(f"a call's arguments: {name}", CHAT, encoded(body))
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}
    tools: list[Any] = [{"type": "function", "function": function}] * 1024
    yield HostileBody("tools", CHAT, encoded(chat(tools=tools)))
    yield HostileBody("too many tools", CHAT, encoded(chat(tools=tools * 3)))
    yield HostileBody(
        "ids", "/v1/completions", filled('{"max_tokens":1,"prompt":[5', ",5", "]}", 520_000)
    )
    yield HostileBody(
        "too many ids", "/v1/completions", filled('{"max_tokens":1,"prompt":[5', ",5", "]}")
    )
    yield HostileBody("wrong ids", "/detokenize", filled('{"tokens":[-1', ",-1", "]}"))
    yield HostileBody("a few wrong ids", "/detokenize", encoded({"tokens": [-1] * 200_000}))
    yield HostileBody("ids as text", "/detokenize", filled('{"tokens":[5', ",5", "]}", 520_000))
    yield HostileBody(
        "prompts", "/v1/completions", encoded({"prompt": ["a"] * 257, "max_tokens": 1})
    )
    prompts = {"prompt": [[5] * 1000] * 250, "max_tokens": 1, "echo": True}
    yield HostileBody("prompts of ids", "/v1/completions", encoded(prompts))
    yield HostileBody("inputs", "/v1/embeddings", encoded({"input": ["a"] * 200_000}))
    yield HostileBody(
        "documents", "/v1/rerank", encoded({"query": "a", "documents": ["a"] * 200_000})
    )
    yield HostileBody("stops", CHAT, encoded(chat(stop=["a"] * 200_000)))
    yield HostileBody("biases", CHAT, encoded(chat(logit_bias={str(i): 1 for i in range(60_000)})))
    yield HostileBody("fields", CHAT, encoded(chat(**{f"field{i}": 1 for i in range(60_000)})))
    yield HostileBody("allowed fields", CHAT, encoded(chat(**{f"field{i}": 1 for i in range(250)})))
    wrong = {str(i): "x" for i in range(60_000)}
    yield HostileBody("wrong biases", CHAT, encoded(chat(logit_bias=wrong)))
    objects = [{"a": 1, "b": 2}] * 16_000
    yield HostileBody("objects", CHAT, encoded(chat(metadata=objects)))
    fields = [{**FRANCE[0], **{f"{n}-{i}": 1 for i in range(200)}} for n in range(300)]
    yield HostileBody("fields of messages", CHAT, encoded(chat(messages=fields)))
    yield HostileBody("names", CHAT, encoded(chat(metadata={f"name{i}": i for i in range(65_000)})))
    yield HostileBody(
        "too many names", CHAT, encoded(chat(metadata={f"name{i}": i for i in range(200_000)}))
    )
    yield HostileBody("values", CHAT, encoded(chat(metadata=[1] * 260_000)))
    yield HostileBody("lists", CHAT, encoded(chat(metadata=[[]] * 260_000)))
    yield HostileBody("too many values", CHAT, filled('{"a":[1', ",1", "]}"))
    yield HostileBody("too many lists", CHAT, filled('{"a":[[]', ",[]", "]}"))
    yield HostileBody("texts and commas", CHAT, filled('{"a":[""', ',""', "]}"))
    yield HostileBody("depth", CHAT, b'{"a":' * 200_000 + b"1" + b"}" * 200_000)
    yield HostileBody("depth of lists", CHAT, b'{"a":' + b"[" * 4_000_000)
    template = {f"name{i}": ["a"] * 4000 for i in range(60)}
    yield HostileBody("template variables", CHAT, encoded(chat(chat_template_kwargs=template)))


HOSTILE_BODIES: Mapping[str, Callable[[], Iterator[HostileBody]]] = {
    "schemas and grammars": _schemas,
    "long texts": _texts,
    "many of something": _many,
}
"""They are made when they are needed: together they have 200 MB."""
