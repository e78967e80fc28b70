"""Ollama's paths about the server and its model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from worker.api.chat.field_types import ModelName
from worker.api.chat.parse.conventions import conventions_of
from worker.api.dialects.ollama.naming import LINES, served, tagged
from worker.api.http.body import Flag, OpenBody, read
from worker.api.http.encoding import json_line, rfc3339
from worker.api.http.operation import JSON, NDJSON, AsInReference, Operation
from worker.api.http.state import AppState
from worker.errors import ModelNotFound
from worker.wire.sampling import PARAMETERS

API_VERSION = "0.12.11"
"""The version of Ollama whose API is served; clients refuse a server that is too old."""
_NEVER = "2300-01-01T00:00:00Z"
"""`expires_at` of a model that is never unloaded; clients require a time."""


class NamedBody(OpenBody):
    """The name of a model."""

    model: ModelName = Field(validation_alias=AliasChoices("model", "name"))
    stream: Flag = True
    verbose: Flag = False


async def tags(request: Request, state: AppState) -> object:
    more = {"modified_at": _started_at(state), "capabilities": _capabilities(state)}
    entries = [_entry(state, name) | more for name in state.all_names]
    return {"models": entries}


def _of_fleet(answers: Sequence[Any]) -> Any:
    return {"models": [entry for answer in answers for entry in answer["models"]]}


async def running(request: Request, state: AppState) -> object:
    status = state.supervisor.status()
    if not status.resident:
        return {"models": []}
    held, left = status.vram_bytes, status.sleeps_in_seconds
    loaded = {
        "size": held,
        "expires_at": _NEVER if left is None else rfc3339(time.time() + left),
        "size_vram": held if state.settings.engine.on_gpu else 0,
        "context_length": state.loaded().model.context_length,
    }
    return {"models": [_entry(state, state.model_name) | loaded]}


async def show(request: Request, state: AppState) -> object:
    body = await read(request, state, NamedBody)
    state.require_model(name := served(body.model, state))
    model = state.loaded().model
    lines = [
        f"{PARAMETERS[name].theirs:<30} {value:g}"
        for name, value in state.served.sampling.items()
        if name in PARAMETERS
    ]
    # The template has a field of its own.
    own = {key: each for key, each in state.served.metadata.items() if "chat_template" not in key}
    facts = {
        "general.parameter_count": model.n_params,
        # Clients request at most this much context, so it is the worker's limit, not the file's.
        f"{model.architecture}.context_length": model.context_length,
    }
    return {
        "license": str(state.served.metadata.get("general.license", "")),
        "modelfile": "",
        "parameters": "\n".join(lines),
        "template": str(state.served.metadata.get("tokenizer.chat_template", "")),
        "details": _details(state, name),
        "model_info": own | facts,
        "capabilities": _capabilities(state),
        "modified_at": _started_at(state),
    }


async def pull(request: Request, state: AppState) -> Response:
    body = await read(request, state, NamedBody)
    if served(body.model, state) not in state.all_names:
        return await change(request, state)
    media_type = NDJSON if body.stream else JSON
    return Response(json_line({"status": "success"}), media_type=media_type)


async def change(request: Request, state: AppState) -> Response:
    names = " and ".join(map(repr, state.all_names))
    raise ModelNotFound(
        f"this worker serves {names} and no other model: --model sets it at the start, and models "
        "are never pulled, created, copied, pushed or deleted"
    )


async def version(request: Request, state: AppState) -> object:
    return {"version": API_VERSION}


async def is_running(request: Request, state: AppState) -> Response:
    return PlainTextResponse("Ollama is running")


def _entry(state: AppState, name: str) -> dict[str, Any]:
    return {
        "name": tagged(name),
        "model": tagged(name),
        "size": state.loaded().model.size_bytes,
        "digest": state.served.metadata_sha256,
        "details": _details(state, name),
    }


def _details(state: AppState, name: str) -> dict[str, Any]:
    model = state.loaded().model
    millions = model.n_params / 1e6
    return {
        "parent_model": tagged(state.model_name) if name in state.adapters.names else "",
        "format": "gguf",
        "family": model.architecture,
        "families": [model.architecture],
        "parameter_size": f"{millions / 1e3:.1f}B" if millions >= 1e3 else f"{millions:.2f}M",
        "quantization_level": model.quant_kind,
        "context_length": model.context_length,
        "embedding_length": model.embedding_length,
    }


def _capabilities(state: AppState) -> list[str]:
    model, template = state.loaded().model, state.served.chat_template
    if model.pooling is not None:
        return [] if model.pooling == "rank" else ["embedding"]
    found = ["completion"]
    if model.has_chat_template:  # if it lacks tools, the prompt describes them
        found.append("tools")
    found += [name for name, is_taken in state.served.modalities.items() if is_taken]
    if conventions_of(template).thinking.begin in template:
        found.append("thinking")
    if any(
        key.endswith((".fim_pre_token_id", ".prefix_token_id")) for key in state.served.metadata
    ):
        found.append("insert")
    return found


def _started_at(state: AppState) -> str:
    return rfc3339(state.started_at, "microseconds")


OPERATIONS = [
    Operation(
        "GET", "/api/tags", tags, "List the models", errors=(503,),
        asks="groups", joined=_of_fleet,
    ),
    Operation(
        "GET", "/api/ps", running, "List the loaded model",
        asks="groups", joined=_of_fleet,
    ),
    Operation(
        "POST", "/api/show", show, "Describe a model",
        body=NamedBody, errors=(400, 404, 413, 503),
    ),
    Operation(
        "POST", "/api/pull", pull, "Succeeds for a served model; nothing is pulled",
        {JSON: AsInReference, NDJSON: LINES}, body=NamedBody, errors=(400, 404, 413),
    ),
    *(
        Operation(method, f"/api/{name}", change, "Refused: models are fixed", errors=(404,))
        for method, name in
        (("POST", "create"), ("POST", "copy"), ("POST", "push"), ("DELETE", "delete"))
    ),
    Operation("GET", "/api/version", version, "The version of Ollama's API"),
    Operation("GET", "/", is_running, "Whether the server runs", {"text/plain": str}, public=True),
]  # fmt: skip
"""If there is a status page, it has `/`; Ollama's client only checks that `HEAD /` returns 200."""
