"""The headers that this server reads, and those of its own that it sends. Pure data, any thread.

Request headers are read only through their entries here, from which `/openapi.json` documents them,
too. An entry without a description is a standard header of HTTP or of browsers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.types import Scope

RawHeaders = list[tuple[bytes, bytes]]
"""Headers as in an ASGI scope."""
Described = Mapping[str, Any]
"""A description and a schema, as OpenAPI has them."""


def _text(description: str, **limits: Any) -> Described:
    return {"description": description, "schema": {"type": "string", **limits}}


def _number(description: str, **limits: Any) -> Described:
    return {"description": description, "schema": {"type": "integer", **limits}}


def _switch(description: str) -> Described:
    return _text(f"1: {description}; any other value counts as absent", examples=["1"])


@dataclass(frozen=True, eq=False)
class Header:
    name: str
    in_request: Described | None = None
    """Its meaning in a request."""
    in_answer: Described | None = None
    """Its meaning in an answer."""

    @cached_property
    def key(self) -> bytes:
        """The name as in an ASGI scope."""
        return self.name.lower().encode()

    def of(self, request: Request) -> str | None:
        """The header's first value in the request, or `None`."""
        return next(iter(self.all(request.scope)), None)

    def all(self, scope: Scope) -> list[str]:
        """All its values in a request's scope."""
        values = (value for name, value in scope["headers"] if name == self.key)
        return [str(value, "latin-1").strip(" \t") for value in values]


_ID = {"maxLength": 128, "pattern": "^[A-Za-z0-9._:@/+=-]+$"}
CORRELATION_ID = Header(
    "X-Correlation-Id",
    in_request=_text("identifies the request in logs and the answer; generated if absent", **_ID),
    in_answer=_text("the request's id in the logs", **_ID),
)
REQUEST_ID = Header(
    "X-Request-Id",
    in_request=_text("the same as X-Correlation-Id, which has precedence", **_ID),
    in_answer=_text("the same as X-Correlation-Id", **_ID),
)
BARE_REQUEST_ID = Header(
    "Request-Id", in_answer=_text("the same again, under Anthropic's name for it", **_ID)
)
ECHOED_IDS = (CORRELATION_ID, REQUEST_ID, BARE_REQUEST_ID)
"""Sent with each answer."""
DEADLINE = Header(
    "X-Deadline",
    in_request=_number(
        "Unix time in milliseconds at which the request is abandoned",
        minimum=0,
        maximum=10**15 - 1,
    ),
)
RESUME = Header(
    "X-Llorch-Resume",
    in_request=_switch("keeps the stream so that a reader can resume it, and gives its events ids"),
    in_answer=_text("id of the kept stream, for the path GET /execute/{id}"),
)
CONVERSATION = Header(
    "X-Conversation-Id",
    in_request=_text("keeps the stream under this name as well, as llama-server does"),
)
LAST_EVENT_ID = Header(
    "Last-Event-ID",
    in_request=_number("resumes after the event with this id", minimum=0, maximum=10**18 - 1),
)
LATE_HEAD = Header(
    "X-Llorch-Late-Head",
    in_request=_switch("delays the headers until the first token, so an error can set the status"),
)
OWNER = Header(
    "X-Llorch-Owner",
    in_request=_text("the client for which a gateway sends the request with its own credential"),
)
BEGAN = Header(
    "X-Llorch-Began",
    in_answer=_text(
        "Unix time in seconds at which the stream began; a fleet's gateway resumes the latest"
    ),
)
WORKER = Header(
    "X-Llorch-Worker",
    in_request=_text("the worker of a fleet that must answer; read by the gateway only"),
    in_answer=_text("the worker that answered; sent by a fleet's gateway"),
)
IGNORED_FIELDS = Header(
    "X-Ignored-Fields",
    in_answer=_text("fields of the body that had no effect: percent-encoded, separated by commas"),
)
RETRY_AFTER = Header(
    "Retry-After",
    in_answer=_number("seconds to wait before the next attempt, if the queue is full", minimum=1),
)
API_KEY = Header("X-Api-Key")
"""Documented as a security scheme, as `Authorization` is."""

ACCEPT = Header("Accept")
ACCEPT_ENCODING = Header("Accept-Encoding")
ASKED_HEADERS = Header("Access-Control-Request-Headers")
AUTHORIZATION = Header("Authorization")
CONNECTION = Header("Connection")
CONTENT_ENCODING = Header("Content-Encoding")
CONTENT_LENGTH = Header("Content-Length")
CONTENT_TYPE = Header("Content-Type")
COOKIE = Header("Cookie")
EXPECT = Header("Expect")
HOST = Header("Host")
IF_NONE_MATCH = Header("If-None-Match")
ORIGIN = Header("Origin")
REFERER = Header("Referer")
SEC_FETCH_MODE = Header("Sec-Fetch-Mode")
SEC_FETCH_SITE = Header("Sec-Fetch-Site")
TRANSFER_ENCODING = Header("Transfer-Encoding")

ALL = tuple(each for each in list(globals().values()) if isinstance(each, Header))
UNBUFFERED = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""Headers of a streamed answer; the second one disables nginx's buffering."""
