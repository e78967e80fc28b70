"""What the supervisor remembers about crashes: how many, how fast, and who was there.

Plain bookkeeping without clocks, tasks or processes of its own; used on the event loop of the
API process.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from dataclasses import replace

from worker.messages import InferenceRequest

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 15.0
SETTLED_SECONDS = 10.0
"""An engine that was ready this long had recovered: its crash starts a new series."""
CRASHES_TO_QUARANTINE = 2
_SUSPECTS_KEPT = 4096


class CrashHistory:
    """Counts crashes in a sliding window and spaces the respawns out."""

    def __init__(self, limit: int, window_seconds: float) -> None:
        self._limit = limit
        self._window_seconds = window_seconds
        self._crashes: deque[float] = deque()
        self._series = 0

    def record(self, now: float, ready_seconds: float, *, served: bool) -> None:
        """A crash at `now`, of an engine that was ready for so long and `served` a request."""
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
        """How long to wait before the next engine is spawned."""
        doubled = FIRST_DELAY_SECONDS * 2.0 ** min(max(self._series - 1, 0), 16)
        return min(doubled, LONGEST_DELAY_SECONDS)


class Quarantine:
    """Requests, by fingerprint, that were in flight at crashes of the engine.

    One that comes through unharmed after its first crash is cleared, so that a popular prompt
    is not refused for good because the kernel killed the engine twice in a year.
    """

    def __init__(self) -> None:
        self._blame: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, request: InferenceRequest) -> bool:
        return bool(self._blame) and (
            self._blame.get(fingerprint(request), 0) >= CRASHES_TO_QUARANTINE
        )

    def blame(self, request: InferenceRequest) -> bool:
        """Note that it was in flight at a crash; true when that puts it into quarantine."""
        key = fingerprint(request)
        self._blame[key] = self._blame.get(key, 0) + 1
        self._blame.move_to_end(key)
        while len(self._blame) > _SUSPECTS_KEPT:
            self._blame.popitem(last=False)
        return self._blame[key] == CRASHES_TO_QUARANTINE

    def absolve(self, request: InferenceRequest) -> None:
        """Note that it ended without harm."""
        if self._blame:
            key = fingerprint(request)
            if self._blame.get(key, 0) < CRASHES_TO_QUARANTINE:
                self._blame.pop(key, None)


def fingerprint(request: InferenceRequest) -> str:
    """A hash of everything that shapes the work; not of the seed, which a retry draws anew."""
    shape = (
        request.prompt,
        replace(request.sampling, seed=0),
        request.max_tokens,
        request.stop,
    )
    return hashlib.sha256(repr(shape).encode("utf-8", "surrogatepass")).hexdigest()
