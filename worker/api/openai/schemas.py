"""The tables of OpenAI's bodies: what is honoured, within this worker's limits.

A field of OpenAI's API that is not in its table is refused by name. Fields whose default does
nothing here are in it with that one value, because clients send them. Pure data, any thread.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from worker.api.fields import Schema
from worker.api.requests import MESSAGES, TOOLS, boolean, integer, number, string, table

MAX_CHOICES = 8
MAX_PROMPTS = 32
MAX_EMBEDDING_INPUTS = 256
MAX_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default


def nullable(schema: Schema) -> Schema:
    """Clients write an absent optional field as null, too."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    widened: dict[str, Any] = {**schema}
    if "type" in schema:
        kinds = schema["type"]
        widened["type"] = [*([kinds] if isinstance(kinds, str) else kinds), "null"]
    if "enum" in schema:
        widened["enum"] = [*schema["enum"], None]
    return widened


def only(*values: Any, text: str = "only its default is honoured") -> Schema:
    return {"enum": [*values, None], "description": text}


_STOP: Schema = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": 100},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": 100},
            "maxItems": 4,
        },
    ]
}
_IDS: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
}
_FUNCTION_CHOICE = table(
    ("type", "function"),
    type={"type": "string", "const": "function"},
    function=table(("name",), name=string(1, 64)),
)
_RESPONSE_FORMAT: Schema = {
    "anyOf": [
        table(("type",), type={"type": "string", "const": "text"}),
        table(("type",), type={"type": "string", "const": "json_object"}),
        table(
            ("type", "json_schema"),
            type={"type": "string", "const": "json_schema"},
            json_schema=table(
                ("name", "schema"),
                name=string(1, 64),
                description=string(),
                schema={"type": "object", "description": "a JSON schema"},
                strict=nullable(boolean()),
            ),
        ),
    ]
}


def _common(max_tokens_out: int, vocab_size: int) -> dict[str, Schema]:
    fields: dict[str, Schema] = {
        "model": string(1, 1024, "this worker's model; another name is a 404"),
        "frequency_penalty": number(-2, 2, 0.0),
        "presence_penalty": number(-2, 2, 0.0),
        "logit_bias": {
            "type": "object",
            "additionalProperties": number(-100, 100),
            "maxProperties": 1024,
            "description": "token id, as a string, to what is added to its logit",
        },
        "n": integer(1, MAX_CHOICES, 1),
        "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
        "stop": _STOP,
        "stream": boolean(False),
        "stream_options": table(
            include_usage=boolean(False), include_obfuscation={"type": "boolean", "const": False}
        ),
        "temperature": number(0, 2, 1.0),
        "top_p": number(0, 1, 1.0),
        "user": string(1, 256, "prompt prefixes are reused only for the same user"),
        # Beyond OpenAI's API:
        "top_k": integer(0, vocab_size, 0, "0 is off"),
        "min_p": number(0, 1, 0.0, "0 is off"),
        "repetition_penalty": number(0, 2, 1.0, "1 is off"),
        "ignore_eos": boolean(False),
        "deterministic": boolean(False, "alone in its batch, nothing reused"),
    }
    return {name: nullable(schema) for name, schema in fields.items()}


@lru_cache(maxsize=8)
def chat_schema(max_tokens_out: int, vocab_size: int) -> Schema:
    """`POST /v1/chat/completions`."""
    tokens = nullable(integer(1, max_tokens_out, None, f"default {max_tokens_out}"))
    return table(
        ("messages",),
        messages=MESSAGES,
        **_common(max_tokens_out, vocab_size),
        max_tokens=tokens,
        max_completion_tokens=tokens,
        logprobs=nullable(boolean(False)),
        top_logprobs=nullable(integer(0, MAX_TOP_LOGPROBS)),
        response_format=nullable(_RESPONSE_FORMAT),
        tools=nullable(TOOLS),
        tool_choice=nullable(
            {
                "anyOf": [
                    {"type": "string", "enum": ["none", "auto", "required"]},
                    _FUNCTION_CHOICE,
                ]
            }
        ),
        parallel_tool_calls=nullable(boolean(True)),
        prompt_cache_key=nullable(
            string(1, 256, "prompt prefixes are reused only under the same key")
        ),
        chat_template_kwargs=nullable(
            {"type": "object", "maxProperties": 32, "description": "variables of the template"}
        ),
        modalities=nullable(
            {"type": "array", "minItems": 1, "maxItems": 1, "items": {"const": "text"}}
        ),
        service_tier=only("auto", "default"),
        store=only(False),
        metadata=only(),
        reasoning_effort=only(),
        verbosity=only(),
    )


@lru_cache(maxsize=8)
def completion_schema(max_tokens_out: int, max_prompt_chars: int, vocab_size: int) -> Schema:
    """`POST /v1/completions`."""
    text = string(1, max_prompt_chars)
    return table(
        ("prompt",),
        prompt={
            "anyOf": [
                text,
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": text},
                _IDS,
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _IDS},
            ]
        },
        **_common(max_tokens_out, vocab_size),
        max_tokens=nullable(
            integer(1, max_tokens_out, min(DEFAULT_COMPLETION_TOKENS, max_tokens_out))
        ),
        logprobs=nullable(integer(0, MAX_TOP_LOGPROBS)),
        best_of=only(1),
        echo=only(False),
        suffix=only(),
    )


@lru_cache(maxsize=8)
def embedding_schema(max_prompt_chars: int) -> Schema:
    """`POST /v1/embeddings`."""
    text = string(1, max_prompt_chars)
    many = {"type": "array", "minItems": 1, "maxItems": MAX_EMBEDDING_INPUTS}
    return table(
        ("input",),
        input={"anyOf": [text, {**many, "items": text}, _IDS, {**many, "items": _IDS}]},
        model=nullable(string(1, 1024)),
        encoding_format=nullable({"type": "string", "enum": ["float", "base64"]}),
        user=nullable(string(1, 256)),
    )
