"""JSON Schemas of what the worker answers; a test holds live answers against them. Pure data."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
MAYBE_TEXT: Schema = {"type": ["string", "null"]}
COUNT: Schema = {"type": "integer", "minimum": 0}
MAYBE_COUNT: Schema = {"type": ["integer", "null"], "minimum": 0}
AMOUNT: Schema = {"type": "number", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}


def exactly(**properties: Schema) -> Schema:
    """An object with these fields; more may come in later versions."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def listing(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


_FAULTS = listing(
    {
        "type": "object",
        "properties": {
            "field": TEXT,
            "constraint": TEXT,
            "message": TEXT,
            "value": {"type": ["number", "boolean"]},
        },
        "required": ["field", "constraint", "message"],
    }
)
ERROR: Schema = {
    "type": "object",
    "properties": {
        "code": TEXT,
        "message": TEXT,
        "retriable": FLAG,
        "correlation_id": TEXT,
        "errors": _FAULTS,
    },
    "required": ["code", "message", "retriable", "correlation_id"],
}
OPENAI_ERROR = exactly(error=exactly(message=TEXT, type=TEXT, param=MAYBE_TEXT, code=TEXT))

_STOP_REASON = one_of("EOS", "MAX_TOKENS", "STOP_SEQUENCE")
_USAGE = exactly(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=exactly(cached_tokens=COUNT),
)
_TOOL_CALL = exactly(id=TEXT, type=one_of("function"), function=exactly(name=TEXT, arguments=TEXT))
_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": one_of("assistant"),
        "content": MAYBE_TEXT,
        "refusal": {"type": "null"},
        "tool_calls": listing(_TOOL_CALL),
    },
    "required": ["role", "content"],
}
_FINISH_REASON = one_of("stop", "length", "tool_calls")
_MAYBE_OBJECT: Schema = {"type": ["object", "null"]}
_CONVERSION: Schema = {
    **exactly(source=TEXT, revision=MAYBE_TEXT, source_sha256=TEXT, outtype=TEXT, version=TEXT),
    "type": ["object", "null"],
    "description": "what the file was converted from, where llorch-convert made it",
}
_MODEL = exactly(id=TEXT, object=one_of("model"), created=COUNT, owned_by=TEXT, meta=ANY_OBJECT)

ANSWERS: dict[str, Schema] = {
    "Text": TEXT,
    "Events": {"description": "one event after the other; see the README for their forms"},
    "Document": exactly(openapi=TEXT, info=ANY_OBJECT, paths=ANY_OBJECT, components=ANY_OBJECT),
    "Health": exactly(
        status=one_of("healthy", "unhealthy"),
        model=TEXT,
        resident=FLAG,
        quant_kind=MAYBE_TEXT,
        vram_bytes_used=COUNT,
        tokenizer_kind=MAYBE_TEXT,
        vocab_size=MAYBE_COUNT,
        context_length=MAYBE_COUNT,
        uptime_seconds=AMOUNT,
        backend=one_of("cpu", "cuda", "metal", "accelerate"),
        device=MAYBE_TEXT,
        last_progress_ms=AMOUNT,
        state=TEXT,
        running=COUNT,
        queued=COUNT,
    ),
    "Ready": {
        "type": "object",
        "properties": {
            "ready": FLAG,
            "state": one_of("idle", "busy", "loading", "draining", "recovering", "failed"),
            "phase": TEXT,
            "percent": {"type": "number", "minimum": 0, "maximum": 100},
        },
        "required": ["ready", "state"],
    },
    "Info": exactly(
        worker_id=TEXT,
        incarnation=TEXT,
        version=TEXT,
        backend=TEXT,
        model_ref=TEXT,
        protocol=one_of("sse"),
        limits=ANY_OBJECT,
        model={
            "type": ["object", "null"],
            "properties": {"metadata_sha256": TEXT, "conversion": _CONVERSION},
            "required": ["metadata_sha256", "conversion"],
        },
        engine=_MAYBE_OBJECT,
        residency=_MAYBE_OBJECT,
    ),
    "Inference": {
        "type": "object",
        "properties": {
            "job_id": TEXT,
            "model": TEXT,
            "started_at": TEXT,
            "seed": COUNT,
            "prompt_tokens": COUNT,
            "cached_tokens": COUNT,
            "text": TEXT,
            "tokens": listing(COUNT),
            "tokens_out": COUNT,
            "decode_time_ms": AMOUNT,
            "stop_reason": _STOP_REASON,
            "stop_sequence_matched": TEXT,
        },
        "required": ["job_id", "text", "tokens", "tokens_out", "stop_reason", "seed"],
    },
    "Cancelled": exactly(job_id=TEXT, status=one_of("cancelled")),
    "Draining": exactly(status=one_of("draining")),
    "Tokens": exactly(tokens=listing(COUNT)),
    "Content": exactly(content=TEXT),
    "Prompt": exactly(prompt=TEXT),
    "ChatCompletion": exactly(
        id=TEXT,
        object=one_of("chat.completion"),
        created=COUNT,
        model=TEXT,
        system_fingerprint=TEXT,
        choices=listing(
            exactly(
                index=COUNT,
                message=_MESSAGE,
                logprobs=_MAYBE_OBJECT,
                finish_reason=_FINISH_REASON,
            )
        ),
        usage=_USAGE,
    ),
    "TextCompletion": exactly(
        id=TEXT,
        object=one_of("text_completion"),
        created=COUNT,
        model=TEXT,
        system_fingerprint=TEXT,
        choices=listing(
            exactly(index=COUNT, text=TEXT, logprobs=_MAYBE_OBJECT, finish_reason=_FINISH_REASON)
        ),
        usage=_USAGE,
    ),
    "Embeddings": exactly(
        object=one_of("list"),
        data=listing(
            exactly(
                object=one_of("embedding"),
                index=COUNT,
                embedding={"type": ["array", "string"], "items": {"type": "number"}},
            )
        ),
        model=TEXT,
        usage=exactly(prompt_tokens=COUNT, total_tokens=COUNT),
    ),
    "Models": exactly(object=one_of("list"), data=listing(_MODEL)),
    "Model": _MODEL,
}
