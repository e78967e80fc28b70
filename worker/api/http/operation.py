"""An operation of the HTTP API, and the dialect that it belongs to. Pure data, any thread.

An operation says what it takes and answers, and how its streams end; `/openapi.json` is made from
that. Its dialect says in which form its failures are told before a stream begins.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request

from worker.api.http.headers import CORRELATION_ID, DEADLINE, REQUEST_ID, WORKER, Described, Header
from worker.api.http.state import AppState
from worker.errors import WorkerError

JSON = "application/json"
SSE = "text/event-stream"
NDJSON = "application/x-ndjson"

JOB_ERRORS = (400, 409, 413, 500, 503, 504)
MODEL_ERRORS = (*JOB_ERRORS, 404)
"""Of operations whose body may name a model."""


AsInReference = Annotated[Any, Field(description="in the form of the API that has this path")]
"""Of an answer whose form is another project's, who documents it."""
Events = Annotated[Any, Field(description="one event after the other, in that API's form")]
Endpoint = Callable[[Request, AppState], Awaitable[object]]
"""Gives a response, or the value that is answered as JSON with the operation's status."""
BodyOf = type[BaseModel] | Callable[[AppState], type[BaseModel]]


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    """May end with a parameter, as `{name}`, which is the rest of a path; `{model}` names a model,
    also to a fleet's gateway."""
    endpoint: Endpoint
    summary: str
    answers: Mapping[str, Any] = field(default_factory=lambda: {JSON: AsInReference})
    """The types of the answers by media type; of a stream, its form."""
    body: BodyOf | None = None
    """The type of the body, or a function that makes it from the worker's state."""
    errors: tuple[int, ...] | None = None
    """The statuses of its failures, unless they follow from its body."""
    status: int = 200
    probe: Literal["liveness", "readiness", "metrics"] | None = None
    """What it tells probes: it is public, quiet, and in its own form when the worker is unwell. A
    fleet's gateway tells it itself."""
    public: bool = False
    """Whether it is answered without a token."""
    quiet: bool = False
    """Whether its requests are logged for debugging only."""
    reads: tuple[Header, ...] = ()
    """The headers of its requests that it alone reads, not each operation."""
    tells: tuple[Header, ...] = ()
    """Of its answers, when it has done what was asked."""
    query: Mapping[str, Described] = field(default_factory=dict)
    """The parameters behind `?` that it reads, as OpenAPI describes them."""
    always_json: bool = False
    """Whether it needs a JSON content type also without a body: no web page's form sends that."""

    names_job: bool = False
    """Whether a `job_id` of its body names a job, and nothing in it a model."""
    asks: Literal["none", "one", "named", "groups", "all", "refused"] = "one"
    """Which of a fleet's workers a gateway asks: none, as the answer needs no state; one of the
    group of the model named; the one that the request names, whose state it changes; one of each
    group; or all of them, because any may have the job or the answer that the request names, or
    each a part of the answer. Or it refuses to ask any."""
    joined: Callable[[Sequence[Any]], Any] | None = None
    """Makes one answer out of several workers' answers; without it, a gateway gives on that of a
    worker that has what was asked for."""

    @property
    def parameters(self) -> list[str]:
        return re.findall(r"{(\w+)", self.path)

    @property
    def streams(self) -> Mapping[str, StreamForm]:
        """The forms of its streams by media type."""
        return {kind: form for kind, form in self.answers.items() if isinstance(form, StreamForm)}

    @property
    def asked_headers(self) -> tuple[Header, ...]:
        """All own headers that are read of its requests, by a fleet's gateway too."""
        deadline = (DEADLINE,) if 504 in self.failures else ()
        worker = () if self.asks == "none" else (WORKER,)
        return (CORRELATION_ID, REQUEST_ID, *deadline, *self.reads, *worker)

    @property
    def failures(self) -> tuple[int, ...]:
        """The statuses of its failures. Where 504 is among them, `X-Deadline` is read."""
        if self.errors is not None:
            return self.errors
        if "model" in getattr(self.body, "model_fields", ()):
            return MODEL_ERRORS
        return () if self.body is None else JOB_ERRORS

    def body_of(self, state: AppState) -> type[BaseModel] | None:
        if self.body is None or isinstance(self.body, type):
            return self.body
        return self.body(state)


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How a failure is answered before the first byte."""

    body: Callable[[WorkerError, str], Mapping[str, Any]]
    """Makes the body from the error and the request's correlation id."""
    schema: Any


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How a stream ends. A gateway reads it, which ends the stream of a worker that it lost."""

    is_end: Callable[[bytes], bool]
    """Whether an event or line is the stream's last."""
    failure: Callable[[WorkerError, bytes, bytes], bytes]
    """Makes the last event of a stream that failed, from the error and the stream's first and
    latest events."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Operations that tell failures in the same form."""

    operations: Sequence[Operation]
    errors: ErrorForm
    model_name: Callable[[str], str] = str
    """The name of a model without what this dialect's clients add to it, in a body or a path."""
    reference: str | None = None
    """Where the form of its answers is documented, if it is another project's."""
    root: str | None = None
    """A path that does not exist is refused in the form of the dialect with the nearest root."""
    api_below: str | None = None
    """A path below which all paths are served too, for a page that asks for them beside itself."""
