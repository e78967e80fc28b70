"""Counts the engine's recent crashes and computes the delay before the next spawn."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 15.0
SETTLED_SECONDS = 10.0
"""An engine that was ready this long had recovered; its crash starts a new series."""

LISTED_CRASHES = 16


@dataclass(frozen=True, slots=True)
class Crash:
    """An unexpected end of an engine process."""

    cause: str
    ready_seconds: float
    """How long the engine was ready; 0 if it never was."""
    served: bool
    """Whether the engine had finished a request."""
    at_unix: float = field(default_factory=time.time)
    at_seconds: float = field(default_factory=time.monotonic)


class CrashHistory:
    """Counts crashes in a sliding window and increases the delay between respawns."""

    def __init__(self, limit: int, window_seconds: float) -> None:
        self._limit = limit
        self._window_seconds = window_seconds
        self._crashes: deque[Crash] = deque(maxlen=max(limit + 1, LISTED_CRASHES))

    def record(self, crash: Crash) -> None:
        self._crashes.append(crash)

    @property
    def latest(self) -> tuple[Crash, ...]:
        """At most `LISTED_CRASHES`, newest last."""
        return tuple(self._crashes)[-LISTED_CRASHES:]

    @property
    def recent(self) -> int:
        """The number of crashes in the window that ends with the last one."""
        since = self._crashes[-1].at_seconds - self._window_seconds
        return sum(crash.at_seconds >= since for crash in self._crashes)

    @property
    def is_loop(self) -> bool:
        return self.recent > self._limit

    @property
    def delay_seconds(self) -> float:
        """The delay before the next spawn, doubled by each crash of a series after the first."""
        n_crashes = 0
        for crash in reversed(self._crashes):
            n_crashes += 1
            if crash.served or crash.ready_seconds >= SETTLED_SECONDS:
                break
        doublings = min(max(n_crashes - 1, 0), 16)
        return min(FIRST_DELAY_SECONDS * 2.0**doublings, LONGEST_DELAY_SECONDS)
