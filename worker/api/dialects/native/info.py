"""`/info` and `/openapi.json`: facts about this worker, its model and its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from worker.api.dialects.native.answers import AnyObject, ConversionAnswer, Info
from worker.api.dialects.native.schema import MAX_JOB_ID_CHARS
from worker.api.http.body import MAX_NESTING
from worker.api.http.encoding import rfc3339
from worker.api.http.operation import JSON, Operation
from worker.api.http.state import AppState
from worker.installation import own_version
from worker.wire.engine_info import EngineInfo
from worker.wire.engine_settings import EngineSettings

_LIMITS = (
    "max_queued_requests max_queued_prompt_tokens max_prompt_chars "
    "metrics_interval_ms keepalive slow_reader_timeout stall_timeout drain_timeout"
).split()
"""Settings that `/info` reports."""
_FACTS = (
    "device device_total_bytes slots speculation projector batch micro_batch prefill_budget "
    "inter_token_target_ms threads threads_derivation cpu_variant findings versions build plan"
).split()
"""Fields of `EngineInfo` that `/info` reports unchanged."""


async def info(request: Request, state: AppState) -> dict[str, Any]:
    settings, status = state.settings, state.supervisor.status()
    engine = status.info
    return {
        "worker_id": state.worker_id,
        "incarnation": state.incarnation,
        "version": own_version(),
        "backend": settings.backend,
        "model_ref": state.model_ref,
        "protocol": "sse",
        "limits": {
            "slots": status.slots,
            **{name: getattr(settings, name) for name in _LIMITS},
            "max_body_bytes": state.served.max_body_bytes,
            "max_tokens_out": state.served.max_tokens_out,
            "max_nesting": MAX_NESTING,
            "max_job_id_chars": MAX_JOB_ID_CHARS,
        },
        "model": _model(state, engine) if engine is not None else None,
        "engine": _engine(engine, settings.engine) if engine is not None else None,
        "residency": asdict(engine.residency) | {"device_bytes": engine.residency.device_bytes}
        if engine is not None
        else None,
        "engine_crashes": [
            {
                "at": rfc3339(crash.at_unix),
                "cause": crash.cause,
                "ready_seconds": round(crash.ready_seconds, 3),
            }
            for crash in status.crashes
        ],
    }


def _model(state: AppState, engine: EngineInfo) -> dict[str, Any]:
    model = asdict(engine.model)
    for adapter in model["adapters"]:
        del adapter["path"]  # Local paths are not for clients.
    return {
        **model,
        "metadata_sha256": state.served.metadata_sha256,
        "conversion": _conversion(model["metadata"]),
    }


def _conversion(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest that llorch-convert wrote into the file; `None` for any other file."""
    found = {key: metadata.get(f"llorch.convert.{key}") for key in ConversionAnswer.__annotations__}
    return found if any(found.values()) else None


def _engine(engine: EngineInfo, settings: EngineSettings) -> dict[str, Any]:
    return {
        **{name: getattr(engine, name) for name in _FACTS},
        "kv": {
            "cells": engine.kv_cells,
            "unified": engine.kv_unified,
            "divisions": engine.kv_divisions,
            "reason": engine.kv_reason,
            "types": settings.kv_types,
            "memory_bytes": engine.memory_bytes,
            "store_bytes": engine.kv_store_bytes,
        },
        "rope": dict(settings.rope),
        "confinement": {each.name: {"holds": each.holds, "how": each.how} for each in engine.walls},
        "load_seconds": round(engine.load_seconds, 3),
    }


async def openapi(request: Request, state: AppState) -> Response:
    document = request.app.description.json(state)
    return Response(document, media_type="application/json")


OPERATIONS = [
    Operation("GET", "/info", info, "Worker, model and engine", {JSON: Info}, quiet=True),
    Operation("GET", "/openapi.json", openapi, "This document", {JSON: AnyObject}),
]
