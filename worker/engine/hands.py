"""Threads that draw for several streams at a time: once a batch is computed, processors are idle.

A draw is NumPy's work on a row as long as the vocabulary, during which NumPy lets go of Python's
lock. Engine thread; the others are its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from worker.errors import WorkerError

MOST_HANDS = 8
"""Beyond, they wait for Python's lock more than they draw."""
_WORTH_SECONDS = 150e-6
"""The least work of a thread: to wake it and to hear of its end costs a third of that."""
_NEWEST = 0.1
"""Weight of the newest measurement in a running mean."""

Draw = Callable[[], int]
Outcome = int | WorkerError


class Hands:
    def __init__(self, count: int = 1) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count - 1, "draw") if count > 1 else None
        self._seconds = 0.0
        """Of one draw, in the mean."""

    def worth(self, n_draws: int) -> int:
        """How many hands so many draws are worth."""
        return max(min(self._count, int(n_draws * self._seconds / _WORTH_SECONDS), n_draws), 1)

    def took(self, seconds: float, n_draws: int) -> None:
        """Record the time of draws one after another."""
        weight = _NEWEST if self._seconds else 1.0
        self._seconds += weight * (seconds / n_draws - self._seconds)

    def draw(self, draws: list[Draw]) -> list[Outcome]:
        """The outcome of each: a token, or the error that it raised."""
        found: list[Outcome] = [0] * len(draws)
        n = self.worth(len(draws))

        def work(first: int) -> None:
            for at in range(first, len(draws), n):
                try:
                    found[at] = draws[at]()
                except WorkerError as error:
                    found[at] = error

        others = [self._pool.submit(work, k) for k in range(1, n)] if self._pool else []
        began = time.perf_counter()
        work(0)
        if others:
            self.took(time.perf_counter() - began, len(range(0, len(draws), n)))
        for other in others:
            other.result()
        return found
