"""The number of compute threads follows the CPUs that the engine may use."""

from __future__ import annotations

import os
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.devices.cpu.budget import Cores
from worker.engine.threads import ThreadsFollowCpus, allowed_cpus
from worker.wire.messages import Event, Threads

N_CPUS = 8
cpu_sets = st.sets(st.integers(0, N_CPUS - 1), min_size=1)


@given(
    st.lists(st.tuples(st.floats(0, 3), cpu_sets), min_size=1),
    st.sampled_from([None, 1.5, 3.0]),
    st.booleans(),
)
def test_the_cpus_are_checked_once_a_second_and_set_the_threads(
    steps: list[tuple[float, set[int]]], quota: float | None, smt: bool
) -> None:
    """`steps`: seconds since the last one, and the CPUs that are then allowed."""
    cores = Cores({cpu: cpu % 4 if smt else cpu for cpu in range(N_CPUS)}, quota, "cpu.max")
    used, events = [2], list[Event]()
    now, allowed = 100.0, set[int]()
    looks: list[float] = []

    def cpus() -> set[int]:
        looks.append(now)
        return allowed

    follows = ThreadsFollowCpus(cores, 2, used.append, events.extend, cpus)
    for seconds, allowed in steps:
        now += seconds
        n_looks = len(looks)
        follows.check(now)
        if len(looks) > n_looks:
            assert used[-1] == cores.threads(allowed)[0]
    assert looks[0] == 100.0 + steps[0][0]
    assert all(later - sooner >= 1.0 for sooner, later in zip(looks, looks[1:], strict=False))
    assert all(one != other for one, other in zip(used, used[1:], strict=False))
    assert [each.threads for each in events if isinstance(each, Threads)] == used[1:]


def test_without_known_cpus_nothing_changes() -> None:
    used: list[int] = []
    follows = ThreadsFollowCpus(Cores({}), 2, used.append, lambda _: None, lambda: None)
    follows.check(5.0)
    assert used == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems lack the call")
def test_cpus_that_a_sandbox_hides_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(_thread: int) -> set[int]:
        raise PermissionError

    monkeypatch.setattr(os, "sched_getaffinity", forbidden)
    assert allowed_cpus() is None


@pytest.mark.skipif(sys.platform != "linux", reason="threads are bound only on Linux")
def test_a_bound_thread_does_not_hide_the_cpus_of_the_others() -> None:
    """For example, OpenMP may bind the engine thread, which checks."""
    allowed, done = os.sched_getaffinity(0), threading.Event()
    unbound = threading.Thread(target=done.wait)
    unbound.start()
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert allowed_cpus() == allowed
    finally:
        os.sched_setaffinity(0, allowed)
        done.set()
        unbound.join()
