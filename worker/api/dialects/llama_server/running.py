"""llama-server's paths for running answers and kept streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.field_types import MAX_CHOICES
from worker.api.dialects.llama_server.completion import STREAM
from worker.api.http.body import Many, OpenBody, read
from worker.api.http.encoding import json_line
from worker.api.http.errors import CHUNK_STREAM, error_object, nested_events
from worker.api.http.faults import refusal
from worker.api.http.headers import BEGAN, OWNER, Described
from worker.api.http.operation import NDJSON, SSE, Operation, StreamForm
from worker.api.http.resume import FROM, READING, go_on, owner_of
from worker.api.http.state import AppState

MAX_LOOKUPS = 1024
_CONVERSATION: dict[str, Described] = {
    "conv_id": {
        "description": "id of a conversation or an answer",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }
}


class ControlBody(OpenBody):
    id: str = Field(min_length=1, max_length=256, description="id of the answer, from its chunks")
    action: Literal["reasoning_end"]


async def control(request: Request, state: AppState) -> object:
    """End the reasoning of all choices of an answer."""
    body = await read(request, state, ControlBody)
    names = (body.id, *(f"{body.id}-{index}" for index in range(1, MAX_CHOICES)))
    if any([state.supervisor.end_reasoning(name) for name in names]):
        return {"success": True}
    return {"success": False, "message": "no active completion for this id"}


class LookupBody(OpenBody):
    conversation_ids: Many[str] = Field(max_length=MAX_LOOKUPS)


async def stream(request: Request, state: AppState) -> Response:
    return go_on(request, state, _conversation(request))


async def end_stream(request: Request, state: AppState) -> Response:
    """End an answer and forget its stream. Succeeds even if there is none."""
    state.streams.remove(owner_of(request.scope), _conversation(request))
    return Response(status_code=204)


def _conversation(request: Request) -> str:
    if name := request.query_params.get("conv_id"):
        return name
    raise refusal("conv_id", "required", "is required: a conversation's id")


async def lookup(request: Request, state: AppState) -> object:
    """The requester's kept streams of the conversations that it lists."""
    body, owner = await read(request, state, LookupBody), owner_of(request.scope)
    return [
        {
            "conversation_id": name,
            "is_done": log.is_done,
            "total_bytes": log.total_bytes,
            "started_at": int(log.began_at),
            "completed_at": int(log.ended_at),
        }
        for name, log in state.streams.named(owner, body.conversation_ids)
    ]


def _successful(answers: Sequence[Any]) -> Any:
    return max(answers, key=lambda answer: bool(answer["success"]))


def _latest(answers: Sequence[Any]) -> Any:
    """Each conversation's latest stream: its turns may have been answered by several workers."""
    found: dict[str, Any] = {}
    streams = [each for answer in answers for each in answer]
    for each in sorted(streams, key=lambda each: (each["started_at"], not each["is_done"])):
        found[each["conversation_id"]] = each
    return list(found.values())


# The chat page also resumes streams of chats, which have OpenAI's form.
_STREAMS = nested_events(lambda event: STREAM.is_end(event) or CHUNK_STREAM.is_end(event))
_LINES = StreamForm(
    lambda line: line.startswith(b'{"error":'),
    lambda error, first, latest: json_line({"error": error_object(error)}),
)
"""For a kept stream of any dialect's lines."""
OPERATIONS = [
    Operation(
        "GET", "/v1/stream", stream, "Resume reading a kept stream",
        {SSE: _STREAMS, NDJSON: _LINES},
        errors=(400, 404), asks="all", reads=READING, sends=(BEGAN,), query=FROM | _CONVERSATION,
    ),
    Operation(
        "DELETE", "/v1/stream", end_stream, "End a kept stream", {}, errors=(400,), status=204,
        asks="all", reads=(OWNER,), query=_CONVERSATION,
    ),
    Operation(
        "POST", "/v1/streams/lookup", lookup, "List the kept streams of conversations",
        body=LookupBody, errors=(400, 413), asks="all", joined=_latest, reads=(OWNER,),
    ),
    *(Operation(
        "POST", f"{prefix}/chat/completions/control", control, "End an answer's reasoning",
        body=ControlBody, errors=(400, 413), asks="all", joined=_successful,
    )
    for prefix in ("/v1", "")),
]  # fmt: skip
