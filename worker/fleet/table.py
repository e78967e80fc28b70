"""The workers as one gateway knows them, and which of them gets a request.

Ray tells who is there (`directory`); what each has to do, and whether it can be reached, the
gateway sees itself. Replaced as a whole from Ray's thread, read on the gateway's event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from worker.fleet.affinity import bound, ranked

REST_SECONDS = 2.0
"""How long a worker that could not be reached is left alone, while others are there."""


@dataclass(eq=False, slots=True)
class Worker:
    """One worker, from its replica's start to the replica's end."""

    id: str
    group: str
    uri: str
    n_running: int = 0
    """Requests that this gateway has there."""
    misses: int = 0
    """Probes in a row that it has not answered."""
    rests_until: float = 0.0
    aborts: set[Callable[[], None]] = field(default_factory=set)
    """What ends the exchanges that are under way with it."""

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.uri)
        return parts.hostname or "", parts.port or 80

    def rest(self) -> None:
        self.rests_until = time.monotonic() + REST_SECONDS

    @property
    def is_well(self) -> bool:
        return self.misses == 0 and time.monotonic() >= self.rests_until


class Table:
    """All workers, by their groups."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, Worker]] = {}

    def replace(self, group: str, uris: Mapping[str, str]) -> None:
        """The group's workers are now these: id → uri. Who is known keeps what is known of it."""
        known = self._groups.get(group, {})
        self._groups[group] = {
            id: known[id] if id in known else Worker(id, group, uri) for id, uri in uris.items()
        }

    def workers(self, group: str | None = None) -> list[Worker]:
        groups = self._groups.values() if group is None else [self._groups.get(group, {})]
        return [worker for workers in groups for worker in workers.values()]

    def choose(self, group: str | None, key: str | None, without: Iterable[str]) -> Worker | None:
        """The worker for a request; `None` if there is none besides those it has been to."""
        tried = set(without)
        left = [worker for worker in self.workers(group) if worker.id not in tried]
        candidates = [worker for worker in left if worker.is_well] or left
        if not candidates:
            return None
        if key is not None:
            by_id = {worker.id: worker for worker in candidates}
            limit = bound(sum(w.n_running for w in candidates) + 1, len(candidates))
            for id in ranked(key, by_id):
                if by_id[id].n_running < limit:
                    return by_id[id]
        return min(candidates, key=lambda worker: (worker.n_running, worker.id))
