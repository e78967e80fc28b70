"""The OpenAPI 3.1 document with this worker's limits, generated from the operations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from worker.api.http import headers
from worker.api.http.body import OpenBody
from worker.api.http.encoding import dumps
from worker.api.http.headers import Header
from worker.api.http.operation import JSON, Dialect, Events, Operation
from worker.api.http.state import AppState
from worker.installation import own_version

_REASONS = {
    400: "the request is invalid; the error lists its faults",
    401: "the bearer token is missing or wrong",
    403: "refused because of its Host, Origin or content type, as a web page could have sent it",
    404: "not found",
    409: "a job with that id is running",
    413: "the body is too large",
    500: "the engine failed",
    503: "temporarily unavailable: loading, queue full or shutting down",
    504: "the deadline has passed",
}


class Description:
    """The document for this worker, with its limits and its model's vocabulary size.

    Generating it takes a tenth of a second, so it is cached until the bodies' types change.
    """

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self._dialects = dialects
        self._types: list[Any] = []
        self._document = b""

    def json(self, state: AppState) -> bytes:
        types = list(_types(state, self._dialects))
        if types != self._types:
            self._document = dumps(_document(state, self._dialects, types)).encode()
            self._types = types
        return self._document


def _types(state: AppState, dialects: Sequence[Dialect]) -> dict[Any, None]:
    types: dict[Any, None] = {}
    for dialect in dialects:
        types[dialect.errors.schema] = None
        for operation in dialect.operations:
            types |= dict.fromkeys((operation.body_of(state), *_kinds(operation).values()))
    types.pop(None, None)
    return types


def _kinds(operation: Operation) -> dict[str, Any]:
    """The answers' types by media type."""
    return {**operation.answers, **dict.fromkeys(operation.streams, Events)}


def _document(state: AppState, dialects: Sequence[Dialect], types: Sequence[Any]) -> dict[str, Any]:
    refs, definitions = TypeAdapter.json_schemas(
        [(kind, "validation", TypeAdapter(kind)) for kind in types],
        ref_template="#/components/schemas/{model}",
    )
    schemas = {kind: refs[kind, "validation"] for kind in types}
    paths: dict[str, dict[str, Any]] = {}
    for dialect in dialects:
        refusal = schemas[dialect.errors.schema]
        for operation in dialect.operations:
            described = _described(operation, refusal, state, schemas)
            if dialect.reference is not None:
                described["externalDocs"] = {"url": dialect.reference}
            paths.setdefault(operation.path, {})[operation.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "servers": [{"url": state.settings.api_prefix or "/"}],
        "info": {
            "title": "llorch-worker",
            "version": own_version(),
            "description": "One GGUF model, served over the APIs that clients have.",
            "license": {"name": "GPL-3.0-or-later", "identifier": "GPL-3.0-or-later"},
        },
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "parameters": {
                each.name: {"name": each.name, "in": "header", "required": False, **each.in_request}
                for each in headers.ALL
                if each.in_request is not None
            },
            "headers": {
                each.name: {**each.in_answer, "required": each in headers.ECHOED_IDS}
                for each in headers.ALL
                if each.in_answer is not None
            },
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "needed when LLORCH_WORKER_TOKEN or --api-key-file is set",
                },
                "key": {
                    "type": "apiKey",
                    "in": "header",
                    "name": headers.API_KEY.name,
                    "description": "the token or a key, instead of a bearer token",
                },
            },
        },
    }


def _described(
    operation: Operation, refusal: Any, state: AppState, schemas: Mapping[Any, Any]
) -> dict[str, Any]:
    body = operation.body_of(state)
    always = [*headers.ECHOED_IDS, *([] if operation.asks == "none" else [headers.WORKER])]
    ignores = isinstance(body, type) and issubclass(body, OpenBody)
    ignored = [headers.IGNORED_FIELDS] if ignores else []
    sent = [*always, *operation.sends, *ignored]
    content = {media_type: schemas[kind] for media_type, kind in _kinds(operation).items()}
    answers = {str(operation.status): _answer("success", content, sent)}
    for code in sorted({*operation.failures, *(() if operation.probe else (401, 403))}):
        if operation.probe:
            answers[str(code)] = _answer("unhealthy or not ready", content, always)
        else:
            retry = [headers.RETRY_AFTER] if code == 503 else []
            read = [] if code in (401, 403) else ignored  # refused before the body is read
            refused = [*always, *retry, *read]
            answers[str(code)] = _answer(_REASONS[code], {JSON: refusal}, refused)
    described: dict[str, Any] = {
        "operationId": _operation_id(operation),
        "summary": operation.summary,
        "parameters": [
            *({"name": name, "in": "path", "required": True,
               "schema": {"type": "string", "minLength": 1}} for name in operation.parameters),
            *({"name": name, "in": "query", **found} for name, found in operation.query.items()),
            *({"$ref": f"#/components/parameters/{each.name}"} for each in operation.all_reads),
        ],
        "responses": answers,
        "security": []
        if operation.probe or operation.public
        else [{}, {"bearer": []}, {"key": []}],
    }  # fmt: skip
    if body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas[body]}}}
    return described


def _answer(description: str, content: Mapping[str, Any], sent: Sequence[Header]) -> dict[str, Any]:
    return {
        "description": description,
        "headers": {each.name: {"$ref": f"#/components/headers/{each.name}"} for each in sent},
        "content": {media_type: {"schema": schema} for media_type, schema in content.items()},
    }


def _operation_id(operation: Operation) -> str:
    words = re.sub(r"{\w+}", "by_name", operation.path).strip("/").replace(".", "/")
    return operation.method.lower() + "_" + words.replace("/", "_").replace("-", "_")
