"""What the engine process is told by its environment; what it is not told, `security/` tests."""

from __future__ import annotations

import psutil

from tests.conftest import StartWorker
from worker.supervisor.engine_process import SPINS_AT_BARRIERS


def spins(start_worker: StartWorker, **given: str) -> str | None:
    worker = start_worker(env=given, wait_ready=False)
    engine_pid = worker.wait_log("engine.spawned")["pid"]
    return psutil.Process(engine_pid).environ().get("GOMP_SPINCOUNT")


def test_threads_wait_for_a_short_time_unless_the_operator_says_how(
    start_worker: StartWorker,
) -> None:
    assert spins(start_worker) == SPINS_AT_BARRIERS
    assert spins(start_worker, GOMP_SPINCOUNT="50000") == "50000"
    assert spins(start_worker, OMP_WAIT_POLICY="active") is None
