"""The worker's own paths for jobs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.operations import STREAMING
from worker.api.chat.request import Generate
from worker.api.chat.run import respond
from worker.api.dialects.native.answers import Done, Sleeping, WholeAnswer
from worker.api.dialects.native.info import OPERATIONS as DESCRIPTIONS
from worker.api.dialects.native.probes import OPERATIONS as PROBES
from worker.api.dialects.native.schema import (
    CancelBody,
    InferenceBody,
    inference_body,
    read_inference,
)
from worker.api.dialects.native.stream import EVENT_STREAM, LINE_STREAM, NativeAnswer, NativeLines
from worker.api.http.body import read
from worker.api.http.errors import FLAT
from worker.api.http.headers import ACCEPT, BEGAN, RESUME
from worker.api.http.operation import JSON, NDJSON, SSE, Dialect, Operation
from worker.api.http.resume import FROM, READING, go_on
from worker.api.http.state import AppState
from worker.errors import JobNotFound


def streaming(path: str, *, needs_job_id: bool) -> Operation:
    body = partial(inference_body, needs_job_id=needs_job_id)

    async def stream(request: Request, state: AppState) -> object:
        return await respond(request, state, body(state), _read_stream, NativeAnswer)

    return Operation(
        "POST", path, stream, "Run a job and stream its events", {SSE: EVENT_STREAM},
        body=body, reads=STREAMING, sends=(RESUME,), names_job=True,
    )  # fmt: skip


async def resume(request: Request, state: AppState) -> Response:
    return go_on(request, state, request.path_params["job_id"])


async def inference(request: Request, state: AppState) -> object:
    body = inference_body(state)
    if NDJSON in (ACCEPT.of(request) or ""):
        return await respond(request, state, body, _read_stream, NativeLines)
    return await respond(request, state, body, read_inference, NativeAnswer)


def _read_stream(body: InferenceBody, state: AppState) -> Generate:
    return replace(read_inference(body, state), streams=True)


async def cancel(request: Request, state: AppState) -> Done:
    body = await read(request, state, CancelBody)
    if not state.supervisor.cancel(body.job_id):
        raise JobNotFound("this worker has no job with that id")
    return {"job_id": body.job_id, "status": "cancelled"}


async def shutdown(request: Request, state: AppState) -> Done:
    state.request_shutdown()
    return {"status": "draining"}


async def sleep(request: Request, state: AppState) -> Done:
    state.supervisor.sleep()
    return {"status": "sleeping"}


async def wake_up(request: Request, state: AppState) -> Done:
    state.supervisor.wake()
    return {"status": "awake" if state.supervisor.state == "ready" else "waking"}


async def is_sleeping(request: Request, state: AppState) -> Sleeping:
    return {"is_sleeping": state.supervisor.state == "sleeping"}


OPERATIONS = [
    streaming("/execute", needs_job_id=True),
    Operation(
        "GET", "/execute/{job_id}", resume, "Resume reading a job's stream",
        {SSE: EVENT_STREAM, NDJSON: LINE_STREAM},
        errors=(400, 404), asks="all", reads=READING, sends=(BEGAN,), query=FROM,
    ),
    streaming("/v1/inference/stream", needs_job_id=False),
    Operation(
        "POST", "/v1/inference", inference, "Run a job and return its whole answer",
        {JSON: WholeAnswer, NDJSON: LINE_STREAM},
        body=inference_body, reads=STREAMING, sends=(RESUME,), names_job=True,
    ),
    Operation(
        "POST", "/cancel", cancel, "Cancel a job", {JSON: Done},
        body=CancelBody, errors=(400, 404, 413, 500), status=202, asks="all", names_job=True,
    ),
    Operation(
        "POST", "/shutdown", shutdown, "Finish running requests, then exit", {JSON: Done},
        status=202, always_json=True, asks="refused",
    ),
    Operation(
        "POST", "/sleep", sleep, "Unload the model until the next request", {JSON: Done},
        errors=(503,), asks="named",
    ),
    Operation(
        "POST", "/wake_up", wake_up, "Load the model of a sleeping worker", {JSON: Done},
        errors=(503,), asks="named",
    ),
    Operation("GET", "/is_sleeping", is_sleeping, "Whether the worker is asleep", {JSON: Sleeping}),
]  # fmt: skip

DIALECT = Dialect([*PROBES, *OPERATIONS, *DESCRIPTIONS], FLAT, root="/")
