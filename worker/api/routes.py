"""The worker's own paths: health, state, jobs and text tools.

Endpoints run on the API process's event loop. `/health`, `/ready`, `/metrics` and `/cancel` read
only what the supervisor already holds, so that they answer whatever the engine is doing.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from worker.api.jobs import start_job
from worker.api.requests import (
    APPLY_TEMPLATE,
    CANCEL,
    DETOKENIZE,
    TOKENIZE,
    chat_prompt_of,
    checked,
    read_inference,
    read_json,
)
from worker.api.responses import (
    EventStream,
    NativeEvents,
    closing_on_disconnect,
    end_event,
    json_response,
    sse,
    started_event,
)
from worker.api.state import AppState, state_of
from worker.errors import JobNotFound
from worker.messages import ApplyTemplate, Detokenize, Failed, Finished, Progress, Token, Tokenize
from worker.observability.metrics import CONTENT_TYPE, Snapshot

# --- health ------------------------------------------------------------------------------


async def health(request: Request) -> Response:
    state = state_of(request)
    supervisor, info = state.supervisor, state.supervisor.info
    sick = supervisor.stalled or supervisor.residency_lost is not None
    body: dict[str, Any] = {
        "status": "unhealthy" if sick else "healthy",
        "model": state.model_ref,
        "resident": info is not None and info.residency.resident and not _lost(state),
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
    if name == "ready" and not _lost(state):
        busy = supervisor.running + supervisor.queued > 0
        return json_response({"ready": True, "state": "busy" if busy else "idle"})
    body: dict[str, Any] = {
        "ready": False,
        "state": name,
        "phase": supervisor.progress.phase,
        "percent": supervisor.progress.percent,
    }
    if _lost(state):
        body |= {"state": "recovering", "residency_lost": supervisor.residency_lost}
    return json_response(body, 503)


def _state_name(state: AppState) -> str:
    return "draining" if state.draining() else state.supervisor.state


def _lost(state: AppState) -> bool:
    return state.supervisor.residency_lost is not None


async def loading_progress(request: Request) -> Response:
    state = state_of(request)

    async def chunks() -> AsyncIterator[bytes]:
        async for progress in state.supervisor.watch_progress():
            yield sse(_progress_event(progress))
        if state.supervisor.state == "ready":
            yield sse(_progress_event(Progress(phase="ready", percent=100.0)))

    return EventStream(chunks(), state, close=lambda: None)


def _progress_event(progress: Progress) -> dict[str, Any]:
    return {
        "type": "progress",
        "phase": progress.phase,
        "percent": progress.percent,
        "bytes_per_second": progress.bytes_per_second,
    }


async def metrics(request: Request) -> Response:
    state = state_of(request)
    supervisor, info, stats = state.supervisor, state.supervisor.info, state.supervisor.stats
    snapshot = Snapshot(
        uptime_seconds=time.monotonic() - state.started_at,
        ready=_state_name(state) == "ready" and not _lost(state),
        resident=info is not None and info.residency.resident and not _lost(state),
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
    )
    return Response(state.metrics.exposition(snapshot), headers={"content-type": CONTENT_TYPE})


# --- jobs --------------------------------------------------------------------------------


async def execute(request: Request) -> Response:
    return await _streamed(request, needs_job_id=True)


async def inference_stream(request: Request) -> Response:
    return await _streamed(request, needs_job_id=False)


async def _streamed(request: Request, *, needs_job_id: bool, framed: bool = True) -> Response:
    state = state_of(request)
    job = await start_job(state, await read_inference(request, state, needs_job_id=needs_job_id))
    media_type = "text/event-stream; charset=utf-8" if framed else "application/x-ndjson"
    chunks = NativeEvents(job, state, framed=framed).chunks()
    return EventStream(chunks, state, job.close, media_type)


async def inference(request: Request) -> Response:
    if "application/x-ndjson" in request.headers.get("accept", ""):
        return await _streamed(request, needs_job_id=False, framed=False)
    state = state_of(request)
    job = await start_job(state, await read_inference(request, state, needs_job_id=False))
    texts: list[str] = []
    token_ids: list[int] = []
    answer: dict[str, Any] = {}
    async with closing_on_disconnect(request, job):
        async for frame in job:
            for event in frame:
                match event:
                    case Token():
                        texts.append(event.text)
                        token_ids += event.token_ids
                    case Finished():
                        answer = end_event(event, job)
                    case Failed(error=error):
                        raise error
    del answer["type"]
    started = started_event(job, state)
    del started["type"]
    return json_response(started | {"text": "".join(texts), "tokens": token_ids} | answer)


async def cancel(request: Request) -> Response:
    state = state_of(request)
    body = checked(await read_json(request, state), CANCEL)
    if not state.supervisor.cancel(body["job_id"]):
        raise JobNotFound("no job of that id was ever accepted by this worker")
    return json_response({"job_id": body["job_id"], "status": "cancelled"}, 202)


async def shutdown(request: Request) -> Response:
    state_of(request).request_shutdown()
    return json_response({"status": "draining"}, 202)


# --- text tools --------------------------------------------------------------------------


async def tokenize(request: Request) -> Response:
    state = state_of(request)
    body = checked(await read_json(request, state), TOKENIZE)
    tokens = await state.supervisor.call(
        lambda call_id: Tokenize(
            call_id, body["content"], add_special=body.get("add_special", False)
        )
    )
    return json_response({"tokens": list(tokens)})


async def detokenize(request: Request) -> Response:
    state = state_of(request)
    body = checked(await read_json(request, state), DETOKENIZE)
    tokens = tuple(int(token) for token in body["tokens"])
    content = await state.supervisor.call(lambda call_id: Detokenize(call_id, tokens))
    return json_response({"content": content})


async def apply_template(request: Request) -> Response:
    state = state_of(request)
    body = checked(await read_json(request, state), APPLY_TEMPLATE)
    prompt = chat_prompt_of(body, state)
    text = await state.supervisor.call(lambda call_id: ApplyTemplate(call_id, prompt))
    return json_response({"prompt": text})


ROUTES = [
    Route("/health", health, methods=["GET"]),
    Route("/ready", ready, methods=["GET"]),
    Route("/v1/ready", ready, methods=["GET"]),
    Route("/v1/loading/progress", loading_progress, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/execute", execute, methods=["POST"]),
    Route("/v1/inference", inference, methods=["POST"]),
    Route("/v1/inference/stream", inference_stream, methods=["POST"]),
    Route("/cancel", cancel, methods=["POST"]),
    Route("/shutdown", shutdown, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/apply-template", apply_template, methods=["POST"]),
]
