"""Adapts the number of compute threads to the CPUs that the engine may use. Engine thread.

These CPUs may change while it runs: by a cpuset, as Kubernetes' static CPU manager and `docker
update` set one, or by `taskset -a`. Two threads on one core wait for each other at every barrier of
a compute graph, of which a token has hundreds, and take several times as long as one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress

from worker.devices.cpu.budget import Cores
from worker.observability.logs import get_logger
from worker.wire.messages import Event, Threads

log = get_logger()

_SECONDS = 1.0
"""The time between two checks, each of which takes some microseconds."""


def allowed_cpus() -> Collection[int] | None:
    """The CPUs that this process may use; `None` if the system cannot report them.

    The engine thread's own affinity is not enough: with `OMP_PROC_BIND` and the like, OpenMP binds
    that thread to its first place at the first compute graph.
    """
    cpus: set[int] = set()
    for thread in threading.enumerate():
        # It may have ended meanwhile; other systems lack the call, and some sandboxes forbid it.
        with suppress(AttributeError, OSError):
            cpus |= os.sched_getaffinity(thread.native_id or 0)
    return cpus or None


class ThreadsFollowCpus:
    def __init__(
        self,
        cores: Cores,
        n_threads: int,
        use_threads: Callable[[int], None],
        send: Callable[[list[Event]], None],
        cpus: Callable[[], Collection[int] | None] = allowed_cpus,
    ) -> None:
        """`n_threads` is the current number of compute threads."""
        self._cores, self._n_threads, self._cpus = cores, n_threads, cpus
        self._use_threads, self._send = use_threads, send
        self._seen: Collection[int] | None = None
        self._check_at = 0.0

    def check(self, now: float) -> None:
        """Check the CPUs, if it is time to; to be called before each step."""
        if now < self._check_at:
            return
        self._check_at = now + _SECONDS
        cpus = self._cpus()
        if cpus is None or cpus == self._seen:
            return
        self._seen = cpus
        n_threads, derivation = self._cores.threads(cpus)
        if n_threads != self._n_threads:
            self._n_threads = n_threads
            self._use_threads(n_threads)
            log.info("engine.cpu_budget", threads=n_threads, derivation=derivation)
            self._send([Threads(n_threads, derivation)])
