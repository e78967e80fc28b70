"""Remembers requests that are suspected of crashing the engine."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

from msgspec.structs import replace

from worker.wire.work import InferenceRequest, Work

CRASHES_TO_QUARANTINE = 2
_SUSPECTS_KEPT = 4096


class Quarantine:
    """Suspected requests, by fingerprint.

    Two crashes within the window put a request into quarantine, until one of them is older than the
    window. A request that finishes after its first crash is cleared at once.
    """

    def __init__(self, window_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_seconds = window_seconds
        self._clock = clock
        self._crashes: OrderedDict[str, list[float]] = OrderedDict()
        """The times of each request's crashes; the latest suspect comes last."""

    def __contains__(self, work: Work) -> bool:
        return bool(self._crashes) and len(self._recent(fingerprint(work))) >= CRASHES_TO_QUARANTINE

    def blame(self, work: Work) -> bool:
        """Record a crash; returns whether the request is in quarantine now."""
        key = fingerprint(work)
        times = [*self._recent(key), self._clock()]
        self._crashes[key] = times
        self._crashes.move_to_end(key)
        if len(self._crashes) > _SUSPECTS_KEPT:
            self._crashes.popitem(last=False)
        return len(times) >= CRASHES_TO_QUARANTINE

    def absolve(self, work: Work) -> None:
        """Clear a request that finished, unless it is in quarantine."""
        if self._crashes:
            key = fingerprint(work)
            if len(self._recent(key)) < CRASHES_TO_QUARANTINE:
                self._crashes.pop(key, None)

    def _recent(self, key: str) -> list[float]:
        since = self._clock() - self._window_seconds
        return [at for at in self._crashes.get(key, ()) if at > since]


def fingerprint(work: Work) -> str:
    """A hash of everything that shapes the work, except the seed, which a retry draws anew."""
    shape: object = work
    if isinstance(work, InferenceRequest):
        shape = (work.prompt, replace(work.sampling, seed=0), work.max_tokens, work.stop)
    return hashlib.sha256(repr(shape).encode("utf-8", "surrogatepass")).hexdigest()
