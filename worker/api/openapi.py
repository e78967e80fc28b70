"""The OpenAPI 3.1 document at `/openapi.json`.

Request bodies are the very tables that check them, within this worker's limits; the answers'
schemas are in `answer_schemas`. Pure functions, any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.api.answer_schemas import ANSWERS, ERROR, OPENAI_ERROR
from worker.api.fields import Schema
from worker.api.openai.schemas import chat_schema, completion_schema, embedding_schema
from worker.api.requests import APPLY_TEMPLATE, CANCEL, DETOKENIZE, TOKENIZE, inference_schema_of
from worker.api.state import AppState, worker_version

JSON = "application/json"
SSE = "text/event-stream"
NDJSON = "application/x-ndjson"

_HEADERS: dict[str, dict[str, Any]] = {
    "X-Correlation-Id": {
        "description": "names the request in logs and answer; made up when absent",
        "schema": {"type": "string", "maxLength": 128, "pattern": "^[A-Za-z0-9._:@/+=-]+$"},
    },
    "X-Deadline": {
        "description": "Unix time in milliseconds after which the request is given up",
        "schema": {"type": "integer", "minimum": 0, "maximum": 10**15 - 1},
    },
}


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    summary: str
    answer: Mapping[str, str]
    """Media type to the name of the answer's schema."""
    body: str | None = None
    errors: tuple[int, ...] = ()
    status: int = 200
    openai: bool = False
    open: bool = False
    """Answers without the bearer token."""
    deadline: bool = False
    parameters: tuple[dict[str, Any], ...] = field(default=())


_JOB = (400, 409, 413, 500, 503, 504)
_CALL = (400, 413, 500, 503)
_MODEL_PATH = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "minLength": 1},
}

OPERATIONS = (
    Operation("get", "/health", "Is the worker alive and well?", {JSON: "Health"}, open=True,
              errors=(503,)),
    Operation("get", "/ready", "May it be given work?", {JSON: "Ready"}, open=True, errors=(503,)),
    Operation("get", "/v1/ready", "May it be given work?", {JSON: "Ready"}, open=True,
              errors=(503,)),
    Operation("get", "/v1/loading/progress", "The start, phase by phase, until ready",
              {SSE: "Events"}),
    Operation("get", "/info", "What is static about the worker", {JSON: "Info"}),
    Operation("get", "/metrics", "Prometheus text", {"text/plain": "Text"}, open=True),
    Operation("get", "/openapi.json", "This document", {JSON: "Document"}),
    Operation("post", "/execute", "Run a job and stream it", {SSE: "Events"}, "ExecuteRequest",
              _JOB, deadline=True),
    Operation("post", "/v1/inference/stream", "Run a job and stream it", {SSE: "Events"},
              "InferenceRequest", _JOB, deadline=True),
    Operation("post", "/v1/inference", "Run a job", {JSON: "Inference", NDJSON: "Events"},
              "InferenceRequest", _JOB, deadline=True),
    Operation("post", "/cancel", "End a job", {JSON: "Cancelled"}, "CancelRequest",
              (400, 404, 413, 500), 202),
    Operation("post", "/shutdown", "Finish what runs, then leave", {JSON: "Draining"}, status=202),
    Operation("post", "/tokenize", "Text to token ids", {JSON: "Tokens"}, "TokenizeRequest", _CALL),
    Operation("post", "/detokenize", "Token ids to text", {JSON: "Content"}, "DetokenizeRequest",
              _CALL),
    Operation("post", "/apply-template", "Messages to a prompt", {JSON: "Prompt"},
              "ApplyTemplateRequest", _CALL),
    Operation("post", "/v1/chat/completions", "OpenAI's chat completions",
              {JSON: "ChatCompletion", SSE: "Events"}, "ChatRequest", (*_JOB, 404), openai=True,
              deadline=True),
    Operation("post", "/v1/completions", "OpenAI's completions",
              {JSON: "TextCompletion", SSE: "Events"}, "CompletionRequest", (*_JOB, 404),
              openai=True, deadline=True),
    Operation("post", "/v1/embeddings", "OpenAI's embeddings", {JSON: "Embeddings"},
              "EmbeddingRequest", (*_CALL, 404), openai=True),
    Operation("get", "/v1/models", "The model served", {JSON: "Models"}, errors=(503,),
              openai=True),
    Operation("get", "/v1/models/{model}", "The model served", {JSON: "Model"},
              errors=(404, 503), openai=True, parameters=(_MODEL_PATH,)),
)  # fmt: skip


def document(state: AppState) -> dict[str, Any]:
    """The document for this worker: its limits and its model's vocabulary are in it."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "llorch-worker",
            "version": worker_version(),
            "description": "One model on one device, behind a pool manager.",
            "license": {"name": "GPL-3.0-or-later", "identifier": "GPL-3.0-or-later"},
        },
        "paths": paths,
        "components": {
            "schemas": {
                **_bodies(state),
                **ANSWERS,
                "Error": ERROR,
                "OpenAIError": OPENAI_ERROR,
            },
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "needed when LLORCH_WORKER_TOKEN is set",
                }
            },
        },
    }


def _bodies(state: AppState) -> dict[str, Schema]:
    settings, info = state.settings, state.supervisor.info
    vocab_size = info.model.vocab_size if info is not None else 2**31 - 1
    out, chars = settings.max_tokens_out, settings.max_prompt_chars
    return {
        "ExecuteRequest": inference_schema_of(state, needs_job_id=True),
        "InferenceRequest": inference_schema_of(state, needs_job_id=False),
        "CancelRequest": CANCEL,
        "TokenizeRequest": TOKENIZE,
        "DetokenizeRequest": DETOKENIZE,
        "ApplyTemplateRequest": APPLY_TEMPLATE,
        "ChatRequest": chat_schema(out, vocab_size),
        "CompletionRequest": completion_schema(out, chars, vocab_size),
        "EmbeddingRequest": embedding_schema(chars),
    }


def _described(operation: Operation) -> dict[str, Any]:
    headers = ["X-Correlation-Id", *(["X-Deadline"] if operation.deadline else [])]
    answers = {
        str(operation.status): _answer("as asked", dict(operation.answer)),
        **{str(code): _refusal(operation, code) for code in sorted(operation.errors)},
    }
    if not operation.open:
        answers["401"] = _refusal(operation, 401)
    described: dict[str, Any] = {
        "operationId": _operation_id(operation),
        "summary": operation.summary,
        "parameters": [
            *operation.parameters,
            *({"name": name, "in": "header", "required": False, **_HEADERS[name]}
              for name in headers),
        ],
        "responses": answers,
        "security": [] if operation.open else [{}, {"bearer": []}],
    }  # fmt: skip
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: _ref(operation.body)}}
    return described


_REASONS = {
    400: "the request is at fault; every fault is listed",
    401: "the bearer token is missing or wrong",
    404: "it is not known here",
    409: "a job of that id is running",
    413: "the body is too large",
    500: "the engine failed",
    503: "not now: loading, queue full or shutting down",
    504: "the deadline has passed",
}


def _refusal(operation: Operation, code: int) -> dict[str, Any]:
    if operation.open:  # the probes answer in their own shape, well or not
        return _answer("not well, or not ready", dict(operation.answer))
    answer = _answer(_REASONS[code], {JSON: "OpenAIError" if operation.openai else "Error"})
    if code == 503:
        answer["headers"]["Retry-After"] = {
            "description": "seconds, when the queue is full",
            "schema": {"type": "integer", "minimum": 1},
        }
    return answer


def _answer(description: str, schemas: dict[str, str]) -> dict[str, Any]:
    return {
        "description": description,
        "headers": {
            "X-Correlation-Id": {**_HEADERS["X-Correlation-Id"], "required": True},
        },
        "content": {media_type: _ref(name) for media_type, name in schemas.items()},
    }


def _ref(name: str) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{name}"}}


def _operation_id(operation: Operation) -> str:
    words = operation.path.replace("{model}", "by_name").strip("/").replace(".", "/")
    return operation.method + "_" + words.replace("/", "_").replace("-", "_")
