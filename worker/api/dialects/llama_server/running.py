"""llama-server's orders to an answer that is running."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.fields import MAX_CHOICES
from worker.api.dialects.llama_server.schema import REFERENCE
from worker.api.http.body import OpenBody, read
from worker.api.http.encoding import json_response
from worker.api.http.errors import NESTED
from worker.api.http.operation import Dialect, Operation
from worker.api.http.state import AppState


class ControlBody(OpenBody):
    id: str = Field(min_length=1, max_length=256, description="of the answer, as its chunks have")
    action: Literal["reasoning_end"]


async def control(request: Request, state: AppState) -> Response:
    """Close the reasoning of all choices of an answer."""
    body = await read(request, state, ControlBody)
    names = (body.id, *(f"{body.id}-{index}" for index in range(1, MAX_CHOICES)))
    if any([state.supervisor.end_reasoning(name) for name in names]):
        return json_response({"success": True})
    return json_response({"success": False, "message": "no active completion for this id"})


OPERATIONS = [
    Operation(
        "POST", f"{prefix}/chat/completions/control", control, "Close an answer's reasoning",
        body=ControlBody, errors=(400, 413),
    )
    for prefix in ("/v1", "")
]  # fmt: skip
DIALECT = Dialect(OPERATIONS, NESTED, reference=REFERENCE)
