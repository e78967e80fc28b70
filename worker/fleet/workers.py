"""The workers that one gateway knows: their state, the choice of one for a request, and probes.

Ray reports which workers exist (`replica`). The gateway itself counts its requests at each worker,
and records which can be reached. Everything here runs on the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from worker.api.http.headers import (
    API_KEY,
    AUTHORIZATION,
    CONTENT_LENGTH,
    EXPECT,
    HOST,
    LATE_HEAD,
    OWNER,
)
from worker.api.http.resume import owner_of
from worker.errors import QueueFull
from worker.fleet.affinity import bound, ranked
from worker.fleet.upstream import HOP_BY_HOP, Headers, fetch

PROBE_EVERY_SECONDS = 2.0
MAX_MISSES = 3
"""Consecutive probes without an answer. A silent worker is found within 3 · (2 + 5) seconds."""
AVOIDED_SECONDS = 2.0
"""How long a worker that could not be reached gets no requests while another one is well."""
_REPLACED = (HOST, CONTENT_LENGTH, EXPECT, LATE_HEAD, AUTHORIZATION, API_KEY, OWNER)
_OURS = frozenset(each.key for each in _REPLACED)
"""The client's headers that the gateway removes or replaces."""


@dataclass(eq=False, slots=True)
class Worker:
    """One worker, from its replica's start to the replica's end."""

    id: str
    group: str
    uri: str
    n_slots: int
    """Requests that it runs at once. Each slot keeps its cells until it is needed again."""
    token: str = field(repr=False)
    """The bearer token that it accepts. Only the gateways have it; clients have another."""
    running: list[str | None] = field(default_factory=list)
    """The keys of the requests that the worker has from this gateway."""
    prefixes: dict[str, float] = field(default_factory=dict)
    """Keys that its slots should hold, least recently used first, with the time of their use."""
    misses: int = 0
    """Consecutive probes that the worker has not answered."""
    avoided_until: float = 0.0
    aborts: set[Callable[[], None]] = field(default_factory=set)
    """Callables that abort the exchanges in progress with this worker."""

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.uri)
        return parts.hostname or "", parts.port or 80

    def headers_for(self, headers: Headers) -> Headers:
        """A client's headers, changed for this worker: with its host, its token, and the owner."""
        kept = [(k, v) for k, v in headers if k not in HOP_BY_HOP and k not in _OURS]
        host = self.uri.removeprefix("http://").encode()
        token, owner = b"Bearer " + self.token.encode(), owner_of({"headers": headers}).encode()
        return [(HOST.key, host), (AUTHORIZATION.key, token), (OWNER.key, owner), *kept]

    def avoid(self) -> None:
        self.avoided_until = time.monotonic() + AVOIDED_SECONDS

    @property
    def is_well(self) -> bool:
        return self.misses == 0 and time.monotonic() >= self.avoided_until

    @property
    def is_silent(self) -> bool:
        """Whether it counts as lost."""
        return self.misses >= MAX_MISSES

    def remember(self, key: str) -> None:
        """Record a request with this key, which uses the least recently used slot."""
        self.prefixes.pop(key, None)
        self.prefixes[key] = time.monotonic()
        if len(self.prefixes) > self.n_slots:
            del self.prefixes[next(iter(self.prefixes))]


def worker_id(group: str, replica: str) -> str:
    """The id of the worker that a replica of the group owns."""
    return f"{group}-{replica}"


class WorkerTable:
    """All workers by group, and those that have left their groups."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, Worker]] = {}
        self._leaving: dict[str, Worker] = {}
        """Workers that have left their groups, but still finish their requests."""

    def replace(self, group: str, workers: Iterable[Worker]) -> None:
        """Set the group's workers; one that stays or returns keeps its state."""
        self._leaving |= self._groups.get(group, {})
        self._groups[group] = {
            worker.id: self._leaving.pop(worker.id, worker) for worker in workers
        }

    def forget_silent(self) -> None:
        """Forget workers that have left their groups and no longer answer."""
        leaving = self._leaving.items()
        self._leaving = {id: worker for id, worker in leaving if not worker.is_silent}

    @property
    def groups(self) -> Set[str]:
        """The groups for which `replace` was called, even if they have no workers."""
        return self._groups.keys()

    def workers(self, group: str | None = None) -> list[Worker]:
        groups = self._groups.values() if group is None else [self._groups.get(group, {})]
        return [worker for workers in groups for worker in workers.values()]

    def all_workers(self) -> list[Worker]:
        """All workers, including those that have left their groups: they accept no new work, but
        may have what a request asks for."""
        return [*self.workers(), *self._leaving.values()]

    def choose(self, group: str, key: str | None, without: Iterable[str]) -> Worker | None:
        """The worker for a request, but none of `without`; `None` if no other is left."""
        tried = set(without)
        left = [worker for worker in self.workers(group) if worker.id not in tried]
        candidates = [worker for worker in left if worker.is_well] or left
        if not candidates:
            return None
        if key is None:
            return _least_loaded(candidates)
        most = bound(sum(len(worker.running) for worker in candidates) + 1, len(candidates))
        worker = _holder(key, candidates, most) or _newcomer(key, candidates, most)
        worker.remember(key)
        return worker


def _holder(key: str, candidates: Iterable[Worker], most: int) -> Worker | None:
    """The worker that last computed a prompt with this key, unless its load is too high.

    If no request with the key is running, as in the next turn of a conversation, any free slot
    there will do. Concurrent requests with the same key are spread: their prefix is worth computing
    on several workers.
    """
    holders = [worker for worker in candidates if key in worker.prefixes]
    for worker in sorted(holders, key=lambda worker: worker.prefixes[key], reverse=True):
        limit = most if key in worker.running else max(most, worker.n_slots)
        if len(worker.running) < limit:
            return worker
    return None


def _newcomer(key: str, candidates: list[Worker], most: int) -> Worker:
    """The first worker in the key's order with an unused slot, else the one with the least recently
    used slot."""
    light = [worker for worker in candidates if len(worker.running) < most]
    is_shared = any(key in worker.running for worker in candidates)
    for workers in [light] if is_shared else [light, candidates]:
        spare = {worker.id: worker for worker in workers if len(worker.prefixes) < worker.n_slots}
        if spare:
            return spare[ranked(key, spare)[0]]
    if not light:
        return _least_loaded(candidates)
    return min(light, key=lambda worker: next(iter(worker.prefixes.values())))


def _least_loaded(workers: Iterable[Worker]) -> Worker:
    return min(workers, key=lambda worker: (len(worker.running), worker.id))


async def watch(table: WorkerTable) -> None:
    """Probe all workers at the same time, again and again, and give up those that fall silent. This
    includes workers that have left their groups, because Ray drops an unreachable machine first.

    A worker that is suspended or unreachable closes no connection, so its streams would hang for
    ever. `/health` never waits for the engine, so a worker that misses three probes counts as lost,
    and its exchanges are aborted.
    """
    while True:
        await asyncio.gather(*map(probe, table.all_workers()))
        table.forget_silent()
        await asyncio.sleep(PROBE_EVERY_SECONDS)


async def probe(worker: Worker) -> None:
    try:
        answer = await fetch(worker.address, "GET", "/health")
    except QueueFull:  # a limit of this gateway, not of the worker
        return
    worker.misses = 0 if answer is not None else worker.misses + 1
    if worker.is_silent:
        for abort in list(worker.aborts):
            abort()
