"""From bytes and headers to a frozen `InferenceRequest`; nothing behind it sees a dict.

Every check that can be made without the engine is made here, all faults of a body at once. The
tables below are also what `/openapi.json` publishes. Runs on the API process's event loop.
"""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pydantic_core
from starlette.requests import Request

from worker.api.fields import Fault, Schema, check, fault
from worker.api.state import AppState
from worker.errors import InferenceTimeout, InvalidRequest, PayloadTooLarge
from worker.messages import ChatPrompt, InferenceRequest, Sampling

MAX_NESTING = 64
MAX_SEED = 2**64 - 1
MAX_JOB_ID_CHARS = 256


# --- body and headers --------------------------------------------------------------------


async def read_json(request: Request, state: AppState) -> dict[str, Any]:
    """The body as a JSON object, bounded in size and nesting."""
    body = await _read_body(request, state.settings.max_body_bytes)
    if not body.strip():
        raise invalid([fault("", "type", "the body is empty; it must be a JSON object")])
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        # The parser's message names what it expected and where, and quotes nothing.
        raise invalid([fault("", "json", f"the body is not valid JSON: {error}")]) from None
    if not isinstance(value, dict):
        raise invalid([fault("", "type", "the body must be a JSON object", value)])
    if body.count(b"{") + body.count(b"[") > MAX_NESTING and _nesting(value) > MAX_NESTING:
        raise invalid(
            [fault("", "nesting", f"the body is nested deeper than {MAX_NESTING} levels")]
        )
    return value


async def _read_body(request: Request, limit_bytes: int) -> bytes:
    def refuse(found: str) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"the body has {found} bytes; this worker takes at most {limit_bytes} bytes",
            limit_bytes=limit_bytes,
        )

    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > limit_bytes:
        raise refuse(declared)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise refuse(f"more than {limit_bytes}")
    return bytes(body)


def _nesting(value: object) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        if depth > MAX_NESTING:
            break
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)  # type: ignore[attr-defined]
            if type(child) is dict or type(child) is list
        ]
    return depth


def deadline_of(request: Request) -> float | None:
    """`X-Deadline` (Unix ms) on the monotonic clock; one that is past ends the request here."""
    raw = request.headers.get("x-deadline")
    if raw is None:
        return None
    if not (raw.isascii() and raw.isdigit() and len(raw) <= 15):
        message = "X-Deadline must be a point in time in whole milliseconds since 1970 (Unix time)"
        raise invalid([fault("X-Deadline", "type", message)])
    seconds_left = int(raw) / 1000 - time.time()
    if seconds_left <= 0:
        raise InferenceTimeout(
            f"the deadline in X-Deadline passed {-seconds_left:.3f} seconds before any work"
        )
    return time.monotonic() + seconds_left


def invalid(faults: list[Fault]) -> InvalidRequest:
    return InvalidRequest("; ".join(f["message"] for f in faults), errors=faults)


def checked(body: Mapping[str, Any], schema: Schema) -> Mapping[str, Any]:
    """`body` as it is, or an `InvalidRequest` with all of its faults."""
    if faults := check(body, schema):
        raise invalid(faults)
    return body


# --- tables ------------------------------------------------------------------------------


def number(minimum: float, maximum: float, default: float | None = None, text: str = "") -> Schema:
    return _described({"type": "number", "minimum": minimum, "maximum": maximum}, default, text)


def integer(minimum: int, maximum: int, default: int | None = None, text: str = "") -> Schema:
    return _described({"type": "integer", "minimum": minimum, "maximum": maximum}, default, text)


def boolean(default: bool | None = None, text: str = "") -> Schema:
    return _described({"type": "boolean"}, default, text)


def string(minimum: int = 0, maximum: int | None = None, text: str = "") -> Schema:
    schema: dict[str, Any] = {"type": "string"}
    if minimum:
        schema["minLength"] = minimum
    if maximum is not None:
        schema["maxLength"] = maximum
    return _described(schema, None, text)


def _described(schema: dict[str, Any], default: object, text: str) -> Schema:
    if default is not None:
        schema["default"] = default
    if text:
        schema["description"] = text
    return schema


def table(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """A closed object: a field that is not in it is refused by name."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


STOP = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": 100},
    "maxItems": 4,
    "default": [],
    "description": "texts that end the output; none of them is sent",
}
SEED: Schema = {
    "type": ["integer", "null"],
    "minimum": 0,
    "maximum": MAX_SEED,
    "description": "drawn when absent; the one that was used is echoed",
}


@lru_cache(maxsize=16)
def inference_schema(
    max_prompt_chars: int, max_tokens_out: int, vocab_size: int, needs_job_id: bool
) -> Schema:
    """The execute request's table, within this worker's limits."""
    return table(
        ("job_id", "prompt") if needs_job_id else ("prompt",),
        job_id=string(1, MAX_JOB_ID_CHARS, "names the job; unique among the running ones"),
        prompt=string(1, max_prompt_chars, "raw text; special tokens in it are recognised"),
        max_tokens=integer(1, max_tokens_out, max_tokens_out),
        temperature=number(0, 2, 1.0, "0 is greedy"),
        top_p=number(0, 1, 1.0, "1 is off"),
        top_k=integer(0, vocab_size, 0, "0 is off"),
        min_p=number(0, 1, 0.0, "0 is off"),
        repetition_penalty=number(0, 2, 1.0, "1 is off"),
        stop=STOP,
        seed=SEED,
        ignore_eos=boolean(False),
        cache_salt=string(1, 128, "prompt prefixes are reused only under the same salt"),
        deterministic=boolean(False, "alone in its batch, nothing reused"),
    )


def inference_schema_of(state: AppState, needs_job_id: bool) -> Schema:
    info = state.supervisor.info
    vocab_size = info.model.vocab_size if info is not None else 2**31 - 1
    settings = state.settings
    return inference_schema(
        settings.max_prompt_chars, settings.max_tokens_out, vocab_size, needs_job_id
    )


TOKENIZE = table(
    ("content",),
    content=string(),
    add_special=boolean(False, "add BOS as the model wants it"),
)
DETOKENIZE = table(
    ("tokens",),
    tokens={"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
)
CANCEL = table(("job_id",), job_id=string(1, MAX_JOB_ID_CHARS))
MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": string(1, 64),
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": table(
                        ("type", "text"), type={"type": "string", "const": "text"}, text=string()
                    ),
                },
                {"type": "null"},
            ]
        },
        "name": string(1, 64),
        "tool_call_id": string(1, 256),
        "tool_calls": {
            "type": ["array", "null"],
            "maxItems": 128,
            "items": table(
                ("type", "function"),
                id=string(1, 256),
                type={"type": "string", "const": "function"},
                function=table(("name", "arguments"), name=string(1, 64), arguments=string()),
            ),
        },
        "reasoning_content": string(),
        # Clients send answers back as they got them, empty fields included.
        **{name: {"type": "null"} for name in ("refusal", "audio", "function_call")},
        "annotations": {"type": ["array", "null"], "maxItems": 0},
    },
    "required": ["role"],
    "additionalProperties": False,
}
MESSAGES: Schema = {"type": "array", "minItems": 1, "maxItems": 2048, "items": MESSAGE}
TOOL: Schema = table(
    ("type", "function"),
    type={"type": "string", "const": "function"},
    function=table(
        ("name",),
        name=string(1, 64),
        description=string(),
        parameters={"type": "object", "description": "a JSON schema"},
        strict={
            "type": ["boolean", "null"],
            "description": "a forced call keeps the schema either way; one that the model makes "
            "by its own choice is as the model wrote it",
        },
    ),
)
TOOLS: Schema = {"type": "array", "minItems": 1, "maxItems": 128, "items": TOOL}
APPLY_TEMPLATE = table(
    ("messages",),
    messages=MESSAGES,
    tools=TOOLS,
    add_generation_prompt=boolean(True),
)


# --- requests ----------------------------------------------------------------------------


async def read_inference(
    request: Request, state: AppState, *, needs_job_id: bool
) -> InferenceRequest:
    """`/execute` and `/v1/inference`: one job in the worker's own words."""
    deadline = deadline_of(request)
    body = checked(await read_json(request, state), inference_schema_of(state, needs_job_id))
    return InferenceRequest(
        job_id=body.get("job_id") or new_job_id(),
        prompt=body["prompt"],
        sampling=Sampling(
            seed=seed_of(body),
            temperature=float(body.get("temperature", 1.0)),
            top_p=float(body.get("top_p", 1.0)),
            top_k=int(body.get("top_k", 0)),
            min_p=float(body.get("min_p", 0.0)),
            repetition_penalty=float(body.get("repetition_penalty", 1.0)),
            ignore_eos=body.get("ignore_eos", False),
        ),
        max_tokens=int(body.get("max_tokens", state.settings.max_tokens_out)),
        stop=tuple(body.get("stop", ())),
        cache_salt=body.get("cache_salt"),
        deterministic=body.get("deterministic", False),
        deadline=deadline,
    )


def seed_of(body: Mapping[str, Any]) -> int:
    seed = body.get("seed")
    return secrets.randbits(64) if seed is None else int(seed)


def new_job_id() -> str:
    return str(uuid.uuid4())


def chat_prompt_of(body: Mapping[str, Any], state: AppState) -> ChatPrompt:
    """The messages for the model's own template; without a template there is no guessing."""
    info = state.supervisor.info
    tools = tuple(body.get("tools") or ())
    if info is not None and not info.model.has_chat_template:
        message = "messages need a chat template, and this model carries none; send a raw prompt"
        raise invalid([fault("messages", "unsupported", message)])
    if tools and info is not None and not info.model.template_takes_tools:
        message = "tools are not honoured: this model's chat template does not take them"
        raise invalid([fault("tools", "unsupported", message)])
    return ChatPrompt(
        messages=tuple(_flattened(message) for message in body["messages"]),
        tools=tools,
        add_generation_prompt=body.get("add_generation_prompt", True),
    )


def _flattened(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Text parts joined and calls' arguments parsed, as chat templates expect them."""
    flat = {
        name: value
        for name, value in message.items()
        if name == "content" or (value is not None and name != "annotations")
    }
    content = flat.get("content")
    if isinstance(content, list):
        flat["content"] = "".join(part["text"] for part in content)
    if calls := flat.get("tool_calls"):
        flat["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call)}}
            for call in calls
        ]
    return flat


def _arguments(call: Mapping[str, Any]) -> Any:
    try:
        return json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        return call["function"]["arguments"]
