"""Bounds of time that hold on a slow machine, and on one that does other work meanwhile."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def slowness() -> float:
    """How many times as long as there a computation takes now, and 1 at least: other work that
    shares caches and cores slows computing down, too."""
    began = time.thread_time()
    sum(n * n for n in range(400_000))
    return max(1.0, (time.thread_time() - began) / _SECONDS_ALONE)


def within(took: float, seconds: float) -> bool:
    """Whether that is so many seconds at most of the machine on which the tests' bounds were set.

    How slow this one is matters only to what took longer: to find out computes for longer itself
    than most of what is measured.
    """
    return took < seconds or took < seconds * slowness()


def soon(measured: Callable[[], list[float]], seconds: float) -> None:
    """The median of a few times is within so many seconds, in one of some rounds: what other work
    delays in one, it leaves alone in another."""
    rounds = []
    for _ in range(ROUNDS):
        rounds.append(measured())
        if median(rounds[-1]) < seconds:
            return
    raise AssertionError(f"not within {seconds} s: {rounds}")


def _used_seconds() -> float:
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total
