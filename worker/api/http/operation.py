"""An operation of the HTTP API, and the dialect that it belongs to. Pure data, any thread.

An operation describes its input, its answers and how its streams end; `/openapi.json` is generated
from it. Its dialect defines the form of errors before a stream begins.
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
"""For operations whose body may name a model."""

AsInReference = Annotated[Any, Field(description="as documented by the API that defines this path")]
"""Type of an answer in another project's form, which that project documents."""
Events = Annotated[Any, Field(description="a stream of events in that API's form")]
Endpoint = Callable[[Request, AppState], Awaitable[object]]
"""Returns a response, or a value to be sent as JSON with the operation's status."""
BodyOf = type[BaseModel] | Callable[[AppState], type[BaseModel]]


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    """May end with a parameter such as `{name}`, which matches the rest of a path. `{model}` names
    a model, by which a fleet's gateway chooses the worker, too."""
    endpoint: Endpoint
    summary: str
    answers: Mapping[str, Any] = field(default_factory=lambda: {JSON: AsInReference})
    """By media type: the type of the answer, or the form of the stream."""
    body: BodyOf | None = None
    """The type of the body, or a function that derives it from the worker's state."""
    errors: tuple[int, ...] | None = None
    """The error statuses; `None`: they follow from the body (`failures`)."""
    status: int = 200
    probe: Literal["liveness", "readiness", "metrics"] | None = None
    """What it reports to probes. Such an operation is public and quiet, and reports failures in its
    own form. A fleet's gateway answers it itself."""
    public: bool = False
    """Whether it needs no token."""
    quiet: bool = False
    """Whether its requests are logged at debug level only."""
    reads: tuple[Header, ...] = ()
    """Request headers that it reads, besides those that every operation does."""
    sends: tuple[Header, ...] = ()
    """Headers of its successful answers, besides those that every answer has."""
    query: Mapping[str, Described] = field(default_factory=dict)
    """The query parameters that it reads, as OpenAPI describes them."""
    always_json: bool = False
    """Whether it requires a JSON content type even without a body, which a web page's form cannot
    send."""
    names_job: bool = False
    """Whether the body's `job_id` names a job. Such a body names no model."""
    asks: Literal["none", "one", "named", "groups", "all", "refused"] = "one"
    """Which of a fleet's workers a gateway asks. `none`: the answer needs no worker's state. `one`:
    any in the named model's group. `named`: the worker that the request names, because its state
    changes. `groups`: one of each group. `all`: every worker, because any may have the job or
    answer that the request names, or each has a part of the answer. `refused`: the gateway does not
    serve the operation."""
    joined: Callable[[Sequence[Any]], Any] | None = None
    """Combines several workers' answers into one. Without it, a gateway forwards the answer of a
    worker that has what was asked for."""

    @property
    def parameters(self) -> list[str]:
        return re.findall(r"{(\w+)", self.path)

    @property
    def streams(self) -> Mapping[str, StreamForm]:
        """The form of each stream by media type."""
        return {kind: form for kind, form in self.answers.items() if isinstance(form, StreamForm)}

    @property
    def all_reads(self) -> tuple[Header, ...]:
        """All request headers of ours that are read, including those that only a gateway reads."""
        deadline = (DEADLINE,) if 504 in self.failures else ()
        worker = () if self.asks == "none" else (WORKER,)
        return (CORRELATION_ID, REQUEST_ID, *deadline, *self.reads, *worker)

    @property
    def failures(self) -> tuple[int, ...]:
        """The error statuses. If 504 is among them, `X-Deadline` is read."""
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
    """How an error is answered before the first byte of an answer."""

    body: Callable[[WorkerError, str], Mapping[str, Any]]
    """Builds the body from the error and the request's correlation id."""
    schema: Any


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How a stream ends. A fleet's gateway uses it to end the stream of a worker that is lost."""

    is_end: Callable[[bytes], bool]
    """Whether an event or line is the stream's last."""
    failure: Callable[[WorkerError, bytes, bytes], bytes]
    """Builds the last event of a failed stream, from the error and the stream's first and latest
    events."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Operations whose errors have the same form."""

    operations: Sequence[Operation]
    errors: ErrorForm
    model_name: Callable[[str], str] = str
    """Strips what this dialect's clients add to a model's name in a body or a path."""
    reference: str | None = None
    """URL of the documentation of its answers, if another project defines them."""
    root: str | None = None
    """A path that does not exist is refused by the dialect with the longest root above it."""
    api_below: str | None = None
    """A path below which all others are served too, for a page with relative links to them."""
