"""A route with the types of its body and answers, from which `/openapi.json` is made. Pure data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from worker.api.http.state import AppState

JSON = "application/json"
SSE = "text/event-stream"
NDJSON = "application/x-ndjson"

JOB_ERRORS = (400, 409, 413, 500, 503, 504)
MODEL_ERRORS = (*JOB_ERRORS, 404)
"""Of operations whose body may name a model."""

Events = Annotated[Any, Field(description="one event after the other; the README has them")]
BodyOf = type[BaseModel] | Callable[[AppState], type[BaseModel]]


class Operation(Route):
    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        summary: str,
        answers: Mapping[str, Any],
        *,
        body: BodyOf | None = None,
        errors: tuple[int, ...] = (),
        status: int = 200,
        probe: bool = False,
    ) -> None:
        """`answers` maps media types to types of answers. `body` may be a function of the worker's
        state. Where 504 is among `errors`, `X-Deadline` is read. A `probe` answers without a token,
        and keeps its own form when the worker is unwell."""
        super().__init__(path, endpoint, methods=[method])
        self.method, self.summary, self.answers = method.lower(), summary, answers
        self._body = body
        self.errors, self.status, self.probe = errors, status, probe

    def body_of(self, state: AppState) -> type[BaseModel] | None:
        if self._body is None or isinstance(self._body, type):
            return self._body
        return self._body(state)
