"""The paths for probes, pools and dashboards.

`/health`, `/ready` and `/metrics` read only what the supervisor already holds, so they answer
whatever the engine is doing.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from worker.api.dialects.native.answers import Health, ReadyAnswer
from worker.api.http.encoding import json_response, sse
from worker.api.http.event_stream import EventStream
from worker.api.http.operation import JSON, SSE, Events, Operation
from worker.api.http.state import AppState, state_of
from worker.observability.metrics import CONTENT_TYPE, Gauges
from worker.wire.messages import Progress


async def health(request: Request) -> Response:
    state = state_of(request)
    supervisor, info = state.supervisor, state.supervisor.info
    sick = supervisor.stalled or supervisor.residency_lost is not None
    body: Health = {
        "status": "unhealthy" if sick else "healthy",
        "model": state.model_ref,
        "resident": supervisor.is_resident,
        "quant_kind": info.model.quant_kind if info else None,
        "vram_bytes_used": info.residency.device_bytes if info else 0,
        "tokenizer_kind": info.model.tokenizer_kind if info else None,
        "vocab_size": info.model.vocab_size if info else None,
        "context_length": info.model.context_length if info else None,
        "uptime_seconds": round(time.monotonic() - state.started_at, 3),
        "backend": state.settings.backend,
        "device": info.device if info else None,
        "last_progress_ms": round(supervisor.last_progress_ms, 3),
        "state": _state_name(state),
        "running": supervisor.running,
        "queued": supervisor.queued,
    }
    if supervisor.stalled:
        body["reason"] = "the engine has work and makes no progress"
    elif supervisor.residency_lost is not None:
        body["reason"] = body["residency_lost"] = supervisor.residency_lost
    if info is not None and info.cpu_variant is not None:
        body["cpu_variant"] = info.cpu_variant
    return json_response(body, 503 if sick else 200)


async def ready(request: Request) -> Response:
    state = state_of(request)
    supervisor = state.supervisor
    name = _state_name(state)
    residency_lost = supervisor.residency_lost
    if name == "ready" and residency_lost is None:
        busy = supervisor.running + supervisor.queued > 0
        return json_response({"ready": True, "state": "busy" if busy else "idle"})
    body: dict[str, Any] = {
        "ready": False,
        "state": name,
        "phase": supervisor.progress.phase,
        "percent": supervisor.progress.percent,
    }
    if residency_lost is not None:
        body |= {"state": "recovering", "residency_lost": residency_lost}
    return json_response(body, 503)


def _state_name(state: AppState) -> str:
    return "draining" if state.supervisor.draining else state.supervisor.state


async def loading_progress(request: Request) -> Response:
    state = state_of(request)

    async def chunks() -> AsyncIterator[bytes]:
        async for progress in state.supervisor.watch_progress():
            yield _progress_event(progress)
        if state.supervisor.state == "ready":
            yield _progress_event(Progress(phase="ready", percent=100.0))

    return EventStream(chunks(), state, jobs=())


def _progress_event(progress: Progress) -> bytes:
    return sse({"type": "progress", **asdict(progress)})


async def metrics(request: Request) -> Response:
    state = state_of(request)
    supervisor, info, stats = state.supervisor, state.supervisor.info, state.supervisor.stats
    snapshot = Gauges(
        uptime_seconds=time.monotonic() - state.started_at,
        ready=_state_name(state) == "ready" and supervisor.residency_lost is None,
        resident=supervisor.is_resident,
        vram_bytes=info.residency.device_bytes if info else 0,
        running=supervisor.running,
        queued=supervisor.queued,
        queued_prompt_tokens=supervisor.queued_prompt_tokens,
        kv_cells_used=stats.kv_cells_used if stats else 0,
        kv_cells_total=stats.kv_cells_total if stats else 0,
        kv_cells_cached=stats.kv_cells_cached if stats else 0,
        last_progress_ms=supervisor.last_progress_ms,
        load_seconds=info.load_seconds if info else 0.0,
        engine_steps=stats.steps if stats else 0,
        decode_seconds=stats.decode_seconds if stats else 0.0,
        overhead_seconds=stats.overhead_seconds if stats else 0.0,
        sample_seconds=stats.sample_seconds if stats else 0.0,
        tokens_drafted=stats.tokens_drafted if stats else 0,
        tokens_accepted=stats.tokens_accepted if stats else 0,
        kv_store_written=stats.kv_store_written if stats else 0,
        kv_store_read=stats.kv_store_read if stats else 0,
        kv_store_evicted=stats.kv_store_evicted if stats else 0,
    )
    return Response(state.metrics.exposition(snapshot), headers={"content-type": CONTENT_TYPE})


_IS_WELL = "Is the worker alive and well?"
_TAKES_WORK = "May it be given work?"
ROUTES = [
    *(
        Operation("GET", path, health, _IS_WELL, {JSON: Health}, errors=(503,), probe=True)
        for path in ("/health", "/v1/health", "/v2/health/live")
    ),
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
