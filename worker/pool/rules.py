"""The worker's promises to its pool manager, as checks on recorded messages. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal
from urllib.parse import urlsplit

STATUSES = ("loading", "ready", "busy", "sleeping", "draining", "failed")
FINAL_STATUSES = ("draining", "failed")
GRACE_SECONDS = 5.0
"""Added to two intervals, the longest time allowed between beats: the machine may be busy."""

_Fields = Mapping[str, type | tuple[type, ...]]
_IDENTITY: _Fields = dict.fromkeys(("worker_id", "incarnation", "uri", "model_ref", "backend"), str)
CALLBACK_FIELDS: _Fields = {
    **_IDENTITY,
    **dict.fromkeys(("protocol", "version"), str),
    "device": (str, list),
    **dict.fromkeys(("vram_bytes", "slots", "context_length"), int),
    "capabilities": list,
}
_COUNTS = ("running", "queued", "queued_prompt_tokens", "kv_cells_used", "kv_cells_total")
HEARTBEAT_FIELDS: _Fields = {
    **_IDENTITY,
    "status": str,
    **dict.fromkeys(("sequence", "slots", "vram_bytes", *_COUNTS), int),
    "resident": bool,
    **dict.fromkeys(("interval_seconds", "uptime_seconds"), (int, float)),
}


@dataclass(frozen=True, slots=True)
class PoolMessage:
    kind: Literal["callback", "heartbeat"]
    received_at: float
    """Seconds on a monotonic clock."""
    payload: Any
    authorized: bool = True
    accepted: bool = True
    """Whether the manager answered with a 2xx, before the worker had closed its side."""
    ready_status: int | None = None
    """The status of the worker's own `/ready` while its callback was being received."""


@dataclass(frozen=True, slots=True)
class Breach:
    rule: str
    detail: str


def judge(messages: Iterable[PoolMessage]) -> list[Breach]:
    """Every broken promise; the messages are in order of arrival."""
    callbacks: dict[str, list[PoolMessage]] = defaultdict(list)
    beats: dict[str, list[PoolMessage]] = defaultdict(list)
    breaches: list[Breach] = []
    for message in messages:
        fields = CALLBACK_FIELDS if message.kind == "callback" else HEARTBEAT_FIELDS
        faults = list(_shape(message.payload, fields))
        breaches += [Breach(f"{message.kind} payload", fault) for fault in faults]
        if not message.authorized:
            breaches.append(Breach(f"{message.kind} token", "the bearer token is missing or wrong"))
        if not faults:
            table = callbacks if message.kind == "callback" else beats
            table[message.payload["incarnation"]].append(message)
    for incarnation, received in callbacks.items():
        breaches += _judge_callbacks(incarnation, received)
    for incarnation, received in beats.items():
        breaches += _judge_beats(incarnation, received, callbacks.get(incarnation, []))
    return breaches


def _shape(payload: Any, fields: _Fields) -> Iterator[str]:
    if not isinstance(payload, dict):
        yield "the body is not a JSON object"
        return
    for name, kind in fields.items():
        value = payload.get(name)
        if name not in payload:
            yield f"{name} is missing"
        elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            yield f"{name} is {value!r}"
    if "status" in fields and payload.get("status") not in STATUSES:
        yield f"status is {payload.get('status')!r}, not one of {', '.join(STATUSES)}"
    try:
        parts = urlsplit(str(payload.get("uri")))
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_http = False
    if not is_http:
        yield f"uri is {payload.get('uri')!r}, not an http URL"


def _judge_callbacks(incarnation: str, received: list[PoolMessage]) -> Iterator[Breach]:
    for message in received:
        if message.ready_status not in (None, 200):
            detail = f"/ready answered {message.ready_status or 'nothing'} during the callback"
            yield Breach("callback after ready", detail)
        if message.payload["protocol"] != "sse":
            yield Breach("callback payload", f"protocol is {message.payload['protocol']!r}")
    for before, _ in pairwise(received):
        if before.accepted:
            detail = f"that of incarnation {incarnation!r} was sent again after it was accepted"
            yield Breach("callback once", detail)


def _judge_beats(
    incarnation: str, received: list[PoolMessage], callbacks: list[PoolMessage]
) -> Iterator[Breach]:
    worker_ids = {message.payload["worker_id"] for message in [*received, *callbacks]}
    if len(worker_ids) > 1:
        yield Breach("identity", f"incarnation {incarnation!r} has the ids {sorted(worker_ids)}")
    # By sequence, not arrival: a beat that its worker abandoned may arrive after the next one.
    for before, after in pairwise(sorted(received, key=lambda each: int(each.payload["sequence"]))):
        was, status = before.payload["status"], after.payload["status"]
        if after.payload["sequence"] == before.payload["sequence"]:
            yield Breach("sequence", f"{after.payload['sequence']} came twice")
        if was in FINAL_STATUSES and status not in FINAL_STATUSES:
            yield Breach("last beat", f"{status} after {was}")
    for before, after in pairwise(received):
        gap = after.received_at - before.received_at
        if (gap - GRACE_SECONDS) / 2 > before.payload["interval_seconds"]:
            yield Breach("interval", f"{gap:.1f} s between beats {before.payload['sequence']} "
                         f"and {after.payload['sequence']}")  # fmt: skip
