"""The headers that this server reads, and its own that it writes. Pure data, any thread.

A header of a request is read through its entry here and in no other way. `/openapi.json` has those
of an operation from the same entries. One without a description is HTTP's or the browsers' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.types import Scope

RawHeaders = list[tuple[bytes, bytes]]
"""As a scope has them."""
Described = Mapping[str, Any]
"""A description and a schema."""


def _text(description: str, **limits: Any) -> Described:
    return {"description": description, "schema": {"type": "string", **limits}}


def _number(description: str, **limits: Any) -> Described:
    return {"description": description, "schema": {"type": "integer", **limits}}


def _switch(description: str) -> Described:
    return _text(f"1: {description}; anything else counts as absent", examples=["1"])


@dataclass(frozen=True, eq=False)
class Header:
    name: str
    asked: Described | None = None
    """What it says in a request."""
    told: Described | None = None
    """What it says in an answer."""

    @cached_property
    def key(self) -> bytes:
        """The name as a scope has it."""
        return self.name.lower().encode()

    def of(self, request: Request) -> str | None:
        """The header's value in the request, of several the first."""
        return next(iter(self.all(request.scope)), None)

    def all(self, scope: Scope) -> list[str]:
        """All of its values in a request's scope."""
        given = (value for name, value in scope["headers"] if name == self.key)
        return [str(value, "latin-1").strip(" \t") for value in given]


_ID = {"maxLength": 128, "pattern": "^[A-Za-z0-9._:@/+=-]+$"}
CORRELATION_ID = Header(
    "X-Correlation-Id",
    asked=_text("names the request in logs and answer; made up when absent", **_ID),
    told=_text("the request's name in the logs", **_ID),
)
REQUEST_ID = Header(
    "X-Request-Id",
    asked=_text("the same as X-Correlation-Id, which counts where both are given", **_ID),
    told=_text("the same as X-Correlation-Id", **_ID),
)
BARE_REQUEST_ID = Header(
    "Request-Id", told=_text("the same again, where Anthropic's clients read it", **_ID)
)
TOLD_IDS = (CORRELATION_ID, REQUEST_ID, BARE_REQUEST_ID)
"""Each answer has them."""
DEADLINE = Header(
    "X-Deadline",
    asked=_number(
        "Unix time in milliseconds after which the request is given up",
        minimum=0,
        maximum=10**15 - 1,
    ),
)
RESUME = Header(
    "X-Llorch-Resume",
    asked=_switch("the stream is kept for a reader that comes back, and its events have ids"),
    told=_text("of a stream that is kept: its id, as GET /execute/{id} has it in its path"),
)
CONVERSATION = Header(
    "X-Conversation-Id",
    asked=_text("the stream is kept under this name too, as llama-server does"),
)
LAST_EVENT_ID = Header(
    "Last-Event-ID",
    asked=_number("the stream goes on behind the event of this id", minimum=0, maximum=10**18 - 1),
)
LATE_HEAD = Header(
    "X-Llorch-Late-Head",
    asked=_switch("a stream's head comes with the first token: until then an error is a status"),
)
OWNER = Header(
    "X-Llorch-Owner",
    asked=_text(
        "of a fleet's gateway, whose clients all have its own credential here: which of them asks"
    ),
)
BEGAN = Header(
    "X-Llorch-Began",
    told=_text(
        "when the stream began, in Unix seconds: a gateway reads the latest of its workers'"
    ),
)
WORKER = Header(
    "X-Llorch-Worker",
    asked=_text("to a fleet's gateway: the worker that must answer; a worker does not read it"),
    told=_text("of a fleet's gateway: the worker that has answered"),
)
IGNORED_FIELDS = Header(
    "X-Ignored-Fields",
    told=_text("the body's fields that had no effect, percent-encoded, with commas between"),
)
RETRY_AFTER = Header(
    "Retry-After",
    told=_number("seconds until the next attempt, where the queue is full", minimum=1),
)
API_KEY = Header("X-Api-Key")
"""Described as `Authorization` is: as a way to show a key."""

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
"""Of an answer that streams; the second is nginx's."""
