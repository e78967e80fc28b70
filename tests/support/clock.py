"""Time limits that hold on slow machines and on busy ones."""

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
"""Time of `slowness`'s computation on the machine for which the tests' limits were set."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Limit the CPU time of this process and of the children that it waited for."""
    began = _used_seconds()
    yield
    assert _used_seconds() - began < seconds


def slowness(clock: Callable[[], float] = time.thread_time) -> float:
    """Return how many times as long as on that machine a computation takes now, at least 1: other
    work that shares caches and cores slows computation down, too. With wall time, waiting for a
    processor also counts."""
    began = clock()
    sum(n * n for n in range(400_000))
    return max(1.0, (clock() - began) / _SECONDS_ALONE)


def within(took: float, seconds: float, by: Callable[[], float] = time.thread_time) -> bool:
    """Whether a time is within a limit that was set on the reference machine.

    Slowness is measured only for longer times, because that takes longer than most measured code.
    """
    return took < seconds or took < seconds * slowness(by)


def in_time(began: float, seconds: float) -> bool:
    """Whether at most `seconds` have passed since that moment of the monotonic clock, by the
    measure of an idle machine."""
    return within(time.monotonic() - began, seconds, time.monotonic)


def soon(measured: Callable[[], list[float]], seconds: float) -> None:
    """Check that the median of a few times is within the limit for an idle machine in one of
    several rounds, since other work does not delay all of them."""
    rounds = []
    for _ in range(ROUNDS):
        rounds.append(took := median(measured()))
        if took < seconds or took < seconds * slowness(time.monotonic):
            return
    raise AssertionError(f"not within {seconds} s: {rounds}")


class HoldClock:
    """Measures for how long its thread was held up by its own process.

    Time in which the process did not compute does not count, nor does time in which the thread
    waited for a processor, even one that another thread of the process used. A native call on
    another thread that holds the GIL counts.
    """

    def __init__(self) -> None:
        self._path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._is_told = self._path.exists()  # only on Linux
        self._last = self._read()

    def lap(self, asleep_seconds: float = 0.0) -> float:
        """Return the seconds since the last lap, minus those that the thread meant to sleep."""
        last, self._last = self._last, self._read()
        wall, computed = (now - then for now, then in zip(self._last, last, strict=True))
        return min(wall - asleep_seconds, computed)

    def _read(self) -> tuple[float, float]:
        """Return the time without waits for a processor, and the CPU time of the process."""
        while True:  # until there was no wait between reading the clocks
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
