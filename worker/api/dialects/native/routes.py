"""The worker's own paths for jobs."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.run import start_job, with_head
from worker.api.dialects.native.answers import CancelAnswer, Draining, Inference
from worker.api.dialects.native.info import OPERATIONS as DESCRIPTIONS
from worker.api.dialects.native.probes import OPERATIONS as PROBES
from worker.api.dialects.native.schema import CancelBody, inference_body, read_inference
from worker.api.dialects.native.stream import (
    EVENT_STREAM,
    LINE_STREAM,
    NativeEvents,
    end_event,
    started_event,
)
from worker.api.http.body import read
from worker.api.http.encoding import json_response
from worker.api.http.errors import FLAT
from worker.api.http.event_stream import EventStream, closing_on_disconnect
from worker.api.http.operation import JOB_ERRORS, JSON, NDJSON, SSE, Dialect, Events, Operation
from worker.api.http.state import state_of
from worker.errors import JobNotFound
from worker.wire.messages import Failed, Finished, Token


async def execute(request: Request) -> Response:
    return await inference_stream(request, needs_job_id=True)


async def inference_stream(
    request: Request, *, needs_job_id: bool = False, framed: bool = True
) -> Response:
    state = state_of(request)
    job = await start_job(state, await read_inference(request, state, needs_job_id=needs_job_id))
    media_type = "text/event-stream; charset=utf-8" if framed else "application/x-ndjson"
    frames = await with_head(request, [job], aiter(job), lambda frame: frame)
    chunks = NativeEvents(job, state, framed=framed).chunks(frames)
    return EventStream(chunks, state, [job], media_type)


async def inference(request: Request) -> Response:
    if "application/x-ndjson" in request.headers.get("accept", ""):
        return await inference_stream(request, framed=False)
    state = state_of(request)
    job = await start_job(state, await read_inference(request, state, needs_job_id=False))
    texts: list[str] = []
    token_ids: list[int] = []
    end: dict[str, Any] = {}
    async with closing_on_disconnect(request, job):
        async for frame in job:
            for event in frame:
                match event:
                    case Token():
                        texts.append(event.text)
                        token_ids += event.token_ids
                    case Finished():
                        end = end_event(event, job)
                    case Failed(error=error):
                        raise error
    del end["type"]
    started = started_event(job, state)
    del started["type"]
    return json_response(started | {"text": "".join(texts), "tokens": token_ids} | end)


async def cancel(request: Request) -> Response:
    state = state_of(request)
    body = await read(request, state, CancelBody)
    if not state.supervisor.cancel(body.job_id):
        raise JobNotFound("no job of that id was ever accepted by this worker")
    return json_response({"job_id": body.job_id, "status": "cancelled"}, 202)


async def shutdown(request: Request) -> Response:
    state_of(request).request_shutdown()
    return json_response({"status": "draining"}, 202)


OPERATIONS = [
    Operation(
        "POST", "/execute", execute, "Run a job and stream it", {SSE: Events},
        body=partial(inference_body, needs_job_id=True), errors=JOB_ERRORS,
    ),
    Operation(
        "POST", "/v1/inference/stream", inference_stream, "Run a job and stream it", {SSE: Events},
        body=inference_body, errors=JOB_ERRORS,
    ),
    Operation(
        "POST", "/v1/inference", inference, "Run a job", {JSON: Inference, NDJSON: Events},
        body=inference_body, errors=JOB_ERRORS,
    ),
    Operation(
        "POST", "/cancel", cancel, "End a job", {JSON: CancelAnswer},
        body=CancelBody, errors=(400, 404, 413, 500), status=202,
    ),
    Operation(
        "POST", "/shutdown", shutdown, "Finish what runs, then leave", {JSON: Draining}, status=202,
        always_json=True,
    ),
]  # fmt: skip

DIALECT = Dialect(
    [*PROBES, *OPERATIONS, *DESCRIPTIONS],
    FLAT,
    {SSE: EVENT_STREAM, NDJSON: LINE_STREAM},
    root="/",
)
