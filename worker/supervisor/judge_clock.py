"""The clock by which the engine is judged: the time in which the judge itself ran.

A container that is paused, a machine that sleeps or that is overloaded stops both processes; then
the engine could do nothing, or this one has not read yet what it did.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class JudgeClock:
    def __init__(self, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Between two calls of `tick`, it goes on by `most` seconds at most."""
        self._most, self._clock = most, clock
        self._seconds, self._ticked_at = 0.0, clock()

    def now(self) -> float:
        """Seconds."""
        return self._seconds + min(self._clock() - self._ticked_at, self._most)

    def tick(self) -> None:
        self._seconds, self._ticked_at = self.now(), self._clock()
