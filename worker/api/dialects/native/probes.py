"""The paths for probes, pools, dashboards, and the status page.

They read only the supervisor's `WorkerStatus` and the counters of `/metrics`, so they answer
whatever the engine is doing. `/status` reports the current work, `/status/history` the last hour:
counts, times and reasons, but no text of requests or answers.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import Response

from worker.api.dialects.native.answers import (
    Health,
    History,
    Load,
    MemoryPart,
    ReadyAnswer,
    Status,
    Version,
)
from worker.api.dialects.native.stream import EVENT_STREAM
from worker.api.http.encoding import json_response, sse
from worker.api.http.event_stream import EventStream
from worker.api.http.operation import JSON, SSE, Operation
from worker.api.http.state import AppState
from worker.installation import own_version
from worker.observability.history import prompt_tokens
from worker.observability.metrics import CONTENT_TYPE
from worker.supervisor.status import WorkerStatus
from worker.wire.messages import Progress


async def health(request: Request, state: AppState) -> object:
    status = state.supervisor.status()
    info = status.info
    body: Health = {
        "status": "healthy",
        "model": state.model_ref,
        "resident": status.resident,
        "quant_kind": info.model.quant_kind if info else None,
        "vram_bytes_used": status.vram_bytes,
        "tokenizer_kind": info.model.tokenizer_kind if info else None,
        "vocab_size": info.model.vocab_size if info else None,
        "context_length": status.context_length,
        "uptime_seconds": round(status.uptime_seconds, 3),
        "backend": state.settings.backend,
        "device": info.device if info else None,
        "last_progress_ms": round(status.last_progress_ms, 3),
        "state": status.state,
        "running": status.running,
        "queued": status.queued,
    }
    if info is not None and info.cpu_variant is not None:
        body["cpu_variant"] = info.cpu_variant
    if status.residency_lost is not None:
        body["residency_lost"] = status.residency_lost
    if (reason := _why_unhealthy(status)) is None:
        return body
    return json_response(body | {"status": "unhealthy", "reason": reason}, 503)


def _why_unhealthy(status: WorkerStatus) -> str | None:
    if status.is_stalled:
        return "the engine has work and makes no progress"
    if status.state != "failed":
        return None
    return "the engine did not start" if status.error is None else status.error.message


async def ready(request: Request, state: AppState) -> object:
    status = state.supervisor.status()
    if status.is_ready:
        name = "busy" if status.is_busy else "sleeping" if status.state == "sleeping" else "idle"
        return {"ready": True, "state": name}
    body: ReadyAnswer = {
        "ready": False,
        "state": status.state,
        "phase": status.progress.phase,
        "percent": status.progress.percent,
    }
    if status.residency_lost is not None:
        body["residency_lost"] = status.residency_lost
    return json_response(body, 503)


async def loading_progress(request: Request, state: AppState) -> Response:
    last = Progress(phase="ready", percent=100.0)

    async def chunks() -> AsyncIterator[bytes]:
        progress = None
        async for progress in state.supervisor.watch_progress(state.settings.keepalive):
            yield _progress_event(progress)
        if progress != last and state.supervisor.status().is_ready:
            yield _progress_event(last)

    return EventStream(chunks())


def _progress_event(progress: Progress) -> bytes:
    return sse({"type": "progress", **asdict(progress)})


async def metrics(request: Request, state: AppState) -> Response:
    text = state.metrics.exposition(state.supervisor.status())
    return Response(text, headers={"content-type": CONTENT_TYPE})


async def load(request: Request, state: AppState) -> Load:
    """The load in vLLM's form."""
    status = state.supervisor.status()
    return {"server_load": status.running + status.queued}


def _of_fleet(loads: Sequence[Load]) -> Load:
    return {"server_load": sum(load["server_load"] for load in loads)}


async def version(request: Request, state: AppState) -> Version:
    return {"version": own_version()}


MOST_WAITING = 32
"""The most waiting requests that are listed; `queued` counts all of them."""


async def status(request: Request, state: AppState) -> Status:
    now = state.supervisor.status()
    return {
        "at": time.time(),
        "state": now.state,
        "phase": now.progress.phase,
        "percent": now.progress.percent,
        "bytes_per_second": now.progress.bytes_per_second,
        "uptime_seconds": now.uptime_seconds,
        "slots": now.slots,
        "running": now.running,
        "queued": now.queued,
        "queued_prompt_tokens": now.queued_prompt_tokens,
        "requests": state.supervisor.activities(MOST_WAITING),
        "kv_cells": {
            "used": now.stats.kv_cells_used - now.stats.kv_cells_cached,
            "cached": now.stats.kv_cells_cached,
            "total": now.stats.kv_cells_total,
        },
        "memory": _memory(now),
        "device_bytes": now.info.device_total_bytes if now.info is not None else 0,
        "prompt_tokens": prompt_tokens(state.metrics),
        "tokens_out": state.metrics.value("worker_tokens_generated_total"),
        "engine_crashes": state.metrics.value("worker_engine_crashes_total"),
        "refusals": [*reversed(state.refusals)],
    }


def _memory(now: WorkerStatus) -> list[MemoryPart]:
    """The planned bytes on the device by part, with the cells split into used, cached and free.
    Empty without a running engine."""
    if now.info is None or not now.resident:
        return []
    parts: list[MemoryPart] = []
    stats = now.stats
    for part, n_bytes in now.info.plan.items():
        if part != "kv" or not stats.kv_cells_total:
            parts.append({"part": part, "bytes": n_bytes})
            continue
        each = n_bytes / stats.kv_cells_total
        used = round(each * (stats.kv_cells_used - stats.kv_cells_cached))
        cached = round(each * stats.kv_cells_cached)
        parts.append({"part": "kv_used", "bytes": used})
        parts.append({"part": "kv_cached", "bytes": cached})
        parts.append({"part": "kv_free", "bytes": n_bytes - used - cached})
    return parts


async def history(request: Request, state: AppState) -> dict[str, list[float | None]]:
    return state.history.columns(History.__annotations__)


OPERATIONS = [
    *(
        Operation(
            "GET", path, health, "Whether the worker is healthy", {JSON: Health},
            errors=(503,), probe="liveness",
        )
        for path in ("/health", "/v1/health", "/v2/health/live", "/ping")
    ),
    Operation(
        "GET", "/load", load, "Number of running and waiting requests", {JSON: Load}, quiet=True,
        asks="all", joined=_of_fleet,
    ),
    Operation("GET", "/version", version, "The worker's version", {JSON: Version}),
    *(
        Operation(
            "GET", path, ready, "Whether the worker accepts requests", {JSON: ReadyAnswer},
            errors=(503,), probe="readiness",
        )
        for path in ("/ready", "/v1/ready", "/v2/health/ready")
    ),
    Operation(
        "GET", "/v1/loading/progress", loading_progress,
        "Stream the progress of the start until the worker is ready", {SSE: EVENT_STREAM},
    ),
    Operation(
        "GET", "/metrics", metrics, "Metrics for Prometheus", {"text/plain": str}, probe="metrics",
    ),
    Operation(
        "GET", "/status", status, "Current state, requests and memory", {JSON: Status}, quiet=True
    ),
    Operation(
        "GET", "/status/history", history, "The last hour's load and latencies",
        {JSON: History}, quiet=True,
    ),
]  # fmt: skip
