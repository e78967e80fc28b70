"""The clock by which the engine is judged: it counts the time in which the judge itself ran.

A paused container, or a machine that sleeps or is overloaded, stops both processes: the engine
could do nothing then, or this process has not yet read what it did.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class JudgeClock:
    def __init__(self, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Between two calls of `tick`, it advances by at most `most` seconds."""
        self._most, self._clock = most, clock
        self._seconds, self._ticked_at = 0.0, clock()

    def now(self) -> float:
        """Seconds."""
        return self._seconds + min(self._clock() - self._ticked_at, self._most)

    def tick(self) -> None:
        self._seconds, self._ticked_at = self.now(), self._clock()
