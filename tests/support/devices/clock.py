"""Time that does not pass while other processes have the CPU."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Computing time of this process and of the children that it waited for."""
    began = _used_seconds()
    yield
    assert _used_seconds() - began < seconds


def _used_seconds() -> float:
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total
