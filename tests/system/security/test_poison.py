"""A request that crashes the engine delays its neighbours briefly, and does not affect the
worker."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conftest import StartWorker
from tests.support import with_engine
from tests.support.worker import WorkerProcess, until
from tests.system.security.poisoned_engine import (
    ABORTS_IN_INTAKE,
    ABORTS_IN_LOOP,
    RAISES_IN_INTAKE,
    RAISES_IN_LOOP,
    RAISES_IN_SAMPLER,
)
from tools import survival

POISONED = with_engine.command("tests.system.security.poisoned_engine")
LONG: dict[str, Any] = {"max_tokens": 250, "ignore_eos": True, "temperature": 0}
N_NEIGHBOURS = 4


@dataclass
class Held:
    worker: WorkerProcess
    expected: survival.Alone
    """The neighbour's answer when it runs alone."""


@pytest.fixture(scope="module")
def held(share_worker: StartWorker) -> Held:
    """A worker that survives all poisons, one after the other."""
    flags = (*survival.EXACT, "--crash-limit", "20")
    worker = share_worker(*flags, command=POISONED, can_be_held=True)
    return Held(worker, survival.alone(worker, "One day", LONG["max_tokens"]))


def poison(worker: WorkerProcess, seed: int) -> int:
    """Send the poison; returns the status of its answer, 0 for a stream that began and failed."""
    body = {"prompt": f"The poison {seed}", "seed": seed, "max_tokens": 50, "ignore_eos": True}
    return worker.post("/v1/inference", body).status_code


def has_come(worker: WorkerProcess, n_before: float) -> bool:
    return worker.n_working > N_NEIGHBOURS or len(worker.logs("engine.crashed")) > n_before


@pytest.mark.parametrize(
    ("seed", "n_crashes"),
    [
        (ABORTS_IN_INTAKE, 2),
        (ABORTS_IN_LOOP, 2),
        (RAISES_IN_SAMPLER, 0),
        (RAISES_IN_LOOP, 2),
        (RAISES_IN_INTAKE, 0),
    ],
    ids=[
        "aborts in the intake",
        "aborts in the loop",
        "raises in its sampler",
        "raises in the loop",
        "raises at the door",
    ],
)
def test_the_neighbours_of_poison_end_well(held: Held, seed: int, n_crashes: int) -> None:
    worker, expected = held.worker, held.expected
    before = worker.metric("worker_engine_crashes_total")

    def all_run() -> bool:
        worker.hold.touch()  # some batches more
        return bool(worker.get("/health").json()["running"] == N_NEIGHBOURS)

    worker.hold.touch()
    with ThreadPoolExecutor(N_NEIGHBOURS + 1) as pool:
        streams = [pool.submit(worker.execute, "One day", **LONG) for _ in range(N_NEIGHBOURS)]
        until(all_run, lambda: "slow")
        poisoned = pool.submit(poison, worker, seed)
        until(lambda: poisoned.done() or has_come(worker, before), lambda: "it did not come")
        worker.hold.unlink()
        assert poisoned.result(120) == 500
        ends = [stream.result(120) for stream in streams]
    for stream in ends:
        assert stream.end["tokens_out"] == len(expected.ids) == len(stream.ids)
        # The second engine may die before it has started all of them.
        assert min(n_crashes, 1) <= stream.end.get("engine_restarts", 0) <= n_crashes
        assert expected.is_told_by(stream.ids)
    assert worker.metric("worker_engine_crashes_total") == before + n_crashes
    if seed == RAISES_IN_LOOP:
        cause = worker.get("/info").json()["engine_crashes"][-1]["cause"]
        assert cause.startswith("LookupError in poisoned_engine.py, line ")
    worker.wait_ready()
    if n_crashes:
        assert poison(worker, seed) == 400, "in quarantine"
    assert worker.execute("The poison of another kind", max_tokens=5).end
