"""Counts the engine's recent crashes, and computes the delay before the next spawn."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import datetime

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 15.0
SETTLED_SECONDS = 10.0
"""An engine that was ready this long had recovered; its crash starts a new series."""

LISTED_CRASHES = 16


@dataclass(frozen=True, slots=True)
class Crash:
    """An unexpected end of an engine process."""

    at: datetime
    """In UTC."""
    cause: str
    ready_seconds: float
    """How long the engine was ready; 0 if it died before that."""


class CrashHistory:
    """Counts crashes in a sliding window and increases the delay between respawns."""

    def __init__(self, limit: int, window_seconds: float) -> None:
        self._limit = limit
        self._window_seconds = window_seconds
        self._crashes: deque[float] = deque()
        self._series = 0

    def record(self, now: float, ready_seconds: float, *, served: bool) -> None:
        """Record a crash at `now`; `served` says whether that engine finished a request."""
        self._crashes.append(now)
        while self._crashes[0] < now - self._window_seconds:
            self._crashes.popleft()
        settled = served or ready_seconds >= SETTLED_SECONDS
        self._series = 1 if settled else self._series + 1

    @property
    def recent(self) -> int:
        return len(self._crashes)

    @property
    def is_loop(self) -> bool:
        return len(self._crashes) > self._limit

    @property
    def delay_seconds(self) -> float:
        """The delay before the next engine is spawned."""
        doubled = FIRST_DELAY_SECONDS * 2.0 ** min(max(self._series - 1, 0), 16)
        return min(doubled, LONGEST_DELAY_SECONDS)
