"""The paths for probes, pools and dashboards.

They read only the supervisor's `WorkerStatus`, so they answer whatever the engine is doing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import Response

from worker.api.dialects.native.answers import Health, Load, ReadyAnswer, Version
from worker.api.http.encoding import json_response, sse
from worker.api.http.event_stream import EventStream
from worker.api.http.operation import JSON, SSE, Events, Operation
from worker.api.http.state import AppState
from worker.installation import own_version
from worker.observability.metrics import CONTENT_TYPE
from worker.supervisor.status import WorkerStatus
from worker.wire.messages import Progress


async def health(request: Request, state: AppState) -> Response:
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
    if (reason := _why_unwell(status)) is None:
        return json_response(body)
    return json_response(body | {"status": "unhealthy", "reason": reason}, 503)


def _why_unwell(status: WorkerStatus) -> str | None:
    if status.is_stalled:
        return "the engine has work and makes no progress"
    if status.state != "failed":
        return None
    return "the engine did not start" if status.error is None else status.error.message


async def ready(request: Request, state: AppState) -> Response:
    status = state.supervisor.status()
    if status.is_ready:
        told = "busy" if status.is_busy else "sleeping" if status.state == "sleeping" else "idle"
        return json_response({"ready": True, "state": told})
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

    async def chunks() -> AsyncIterator[bytes]:
        async for progress in state.supervisor.watch_progress(state.settings.keepalive):
            yield _progress_event(progress)
        if state.supervisor.status().is_ready:
            yield _progress_event(Progress(phase="ready", percent=100.0))

    return EventStream(chunks())


def _progress_event(progress: Progress) -> bytes:
    return sse({"type": "progress", **asdict(progress)})


async def metrics(request: Request, state: AppState) -> Response:
    text = state.metrics.exposition(state.supervisor.status())
    return Response(text, headers={"content-type": CONTENT_TYPE})


async def load(request: Request, state: AppState) -> Response:
    """As vLLM tells it."""
    status = state.supervisor.status()
    return json_response({"server_load": status.running + status.queued})


async def version(request: Request, state: AppState) -> Response:
    return json_response({"version": own_version()})


_IS_WELL = "Is the worker alive and well?"
_TAKES_WORK = "May it be given work?"
OPERATIONS = [
    *(
        Operation("GET", path, health, _IS_WELL, {JSON: Health}, errors=(503,), probe=True)
        for path in ("/health", "/v1/health", "/v2/health/live", "/ping")
    ),
    Operation("GET", "/load", load, "Requests that run or wait", {JSON: Load}, quiet=True),
    Operation("GET", "/version", version, "This worker's version", {JSON: Version}),
    *(
        Operation("GET", path, ready, _TAKES_WORK, {JSON: ReadyAnswer}, errors=(503,), probe=True)
        for path in ("/ready", "/v1/ready", "/v2/health/ready")
    ),
    Operation(
        "GET", "/v1/loading/progress", loading_progress,
        "The start, phase by phase, until ready", {SSE: Events},
    ),
    Operation("GET", "/metrics", metrics, "Prometheus text", {"text/plain": str}, probe=True),
]  # fmt: skip
