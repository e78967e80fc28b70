"""Clients of a fleet, and the outcomes of their requests. Plain asyncio, on one loop."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from worker.fleet.upstream import Exchange, Lost, NotReached, fetch

_NUMBERS = itertools.count()


@dataclass
class Outcome:
    """The outcome of one request."""

    kind: str
    """ok · error: a coded event after the first token · lost: no answer, or an error status, before
    the first token · cut: a stream without its last event."""
    status: int = 0
    worker: str = ""
    cached_tokens: int = 0
    first_ms: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    headers: dict[bytes, bytes] = field(default_factory=dict)


def job(prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    name = f"job-{next(_NUMBERS)}-{time.monotonic_ns()}"
    return {
        "job_id": name, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more,
    }  # fmt: skip


async def stream(
    uri: str, body: Mapping[str, Any], leave_after: int | None = None, token: str = ""
) -> Outcome:
    """Send one `/execute`, and read it to its end or for a number of chunks."""
    parts = urlsplit(uri)
    sent = [(b"host", parts.netloc.encode()), (b"content-type", b"application/json")]
    sent.append((b"authorization", f"Bearer {token}".encode()))
    began = time.perf_counter()
    data, outcome = b"", Outcome("cut")
    async with AsyncExitStack() as ends:
        ends.enter_context(suppress(Lost))
        try:
            exchange = await ends.enter_async_context(Exchange.begin(
                parts.hostname or "", parts.port or 80, "POST", b"/execute", sent,
                json.dumps(body).encode(),
            ))  # fmt: skip
        except NotReached:
            return Outcome("lost")
        await exchange.head()
        outcome.status, outcome.headers = exchange.status, dict(exchange.headers)
        outcome.worker = exchange.header(b"x-llorch-worker").decode()
        if exchange.status != 200:
            outcome.kind, outcome.first_ms = "lost", 1000 * (time.perf_counter() - began)
            return outcome
        last = 0.0
        for n in itertools.count(1):
            if (chunk := await exchange.chunk()) is None or n == leave_after:
                break
            now, data = time.perf_counter(), data + chunk
            if last:
                outcome.gaps_ms.append(1000 * (now - last))
            outcome.first_ms, last = outcome.first_ms or 1000 * (now - began), now
    events = [json.loads(part.rpartition(b"data: ")[2]) for part in data.split(b"\n\n")
              if b"data: " in part]  # fmt: skip
    if events:
        outcome.cached_tokens = events[0].get("cached_tokens", 0)
        outcome.kind = {"end": "ok", "error": "error"}.get(events[-1]["type"], "cut")
    elif not outcome.status:
        outcome.kind = "lost"
    return outcome


@asynccontextmanager
async def crowd(uri: str, n_clients: int, max_tokens: int) -> AsyncIterator[list[Outcome]]:
    """Clients that repeat requests while the block runs, and then finish their last ones."""
    outcomes: list[Outcome] = []
    stopping = False

    async def client(number: int) -> None:
        for turn in prompts(number):
            if stopping:
                return
            outcomes.append(await stream(uri, job(turn, max_tokens)))

    tasks = [asyncio.create_task(client(n)) for n in range(n_clients)]
    try:
        yield outcomes
    finally:
        stopping = True
        await asyncio.gather(*tasks)


def prompts(client: int) -> Iterator[str]:
    for turn in itertools.count():
        yield f"Client {client} tells, in turn {turn}, of a fox"


def counted(outcomes: list[Outcome]) -> dict[str, int]:
    counts = Counter(outcome.kind for outcome in outcomes)
    return {kind: counts[kind] for kind in ("ok", "error", "lost", "cut")}


async def get(uri: str, path: str) -> Any:
    """Return a GET's JSON; `None` without one."""
    parts = urlsplit(uri)
    answer = await fetch((parts.hostname or "", parts.port or 80), "GET", path)
    with suppress(ValueError):
        return json.loads(answer.content) if answer is not None else None
    return None
