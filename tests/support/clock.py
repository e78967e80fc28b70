"""Bounds of time that hold on a slow machine, and on one that does other work meanwhile."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

ROUNDS = 3
_SECONDS_ALONE = 0.02
"""Of `slowness`'s computation, on the machine on which the tests' bounds were set."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Computing time of this process and of the children that it waited for."""
    began = _used_seconds()
    yield
    assert _used_seconds() - began < seconds


def slowness(clock: Callable[[], float] = time.thread_time) -> float:
    """How many times as long as there a computation takes now, and 1 at least: other work that
    shares caches and cores slows computing down, too. By a clock that everybody shares, what waits
    for a processor counts as well."""
    began = clock()
    sum(n * n for n in range(400_000))
    return max(1.0, (clock() - began) / _SECONDS_ALONE)


def within(took: float, seconds: float, by: Callable[[], float] = time.thread_time) -> bool:
    """Whether that is so many seconds at most of the machine on which the tests' bounds were set.

    How slow this one is matters only to what took longer: to find out computes for longer itself
    than most of what is measured.
    """
    return took < seconds or took < seconds * slowness(by)


def in_time(began: float, seconds: float) -> bool:
    """Whether it is so many seconds at most since that moment of the monotonic clock, on a machine
    that has nothing else to do."""
    return within(time.monotonic() - began, seconds, time.monotonic)


def soon(measured: Callable[[], list[float]], seconds: float) -> None:
    """The median of a few times is within so many seconds of a machine that has nothing else to
    do, in one of some rounds: what other work delays in one, it leaves alone in another."""
    rounds = []
    for _ in range(ROUNDS):
        rounds.append(took := median(measured()))
        if took < seconds or took < seconds * slowness(time.monotonic):
            return
    raise AssertionError(f"not within {seconds} s: {rounds}")


class HoldClock:
    """For how long the thread that made it was held up by its own process.

    Time in which the process did not compute is the machine's, and so is that in which the thread
    waited for a processor, be it one that another thread of the process had. A native call on
    another thread that keeps the GIL counts.
    """

    def __init__(self) -> None:
        self._path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._is_told = self._path.exists()  # on Linux alone
        self._last = self._read()

    def lap(self, asleep_seconds: float = 0.0) -> float:
        """Seconds since the last lap, less those that the thread meant to sleep."""
        last, self._last = self._last, self._read()
        wall, computed = (now - then for now, then in zip(self._last, last, strict=True))
        return min(wall - asleep_seconds, computed)

    def _read(self) -> tuple[float, float]:
        """The time without waits for a processor, and that which the process has computed."""
        while True:  # until there was no wait between the looks at the clocks
            waited, now = self._waited(), (time.perf_counter(), time.process_time())
            if self._waited() == waited:
                return now[0] - waited, now[1]

    def _waited(self) -> float:
        return int(self._path.read_text().split()[1]) / 1e9 if self._is_told else 0.0


def _used_seconds() -> float:
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total
