"""Many clients that come, disconnect and cancel: nothing leaks or is mixed up."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import pytest

from tests.conftest import StartWorker
from tests.support import sse
from tests.support.worker import PATIENCE_S, WorkerProcess, new_job_id

CLIENTS = 32
MEMORY_GROWTH_BYTES = 24 << 20

# Each prompt asks for a unique text, so that an answer of another stream is detected.
SECRETS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Norway": "Oslo",
    "Finland": "Helsinki",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Greece": "Athens",
    "Ireland": "Dublin",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Cuba": "Havana",
}


@dataclass
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def suffices(self) -> bool:
        n = self.outcomes
        return n["answered"] > 30 and min(n["cancelled"], n["left"]) > 5


@pytest.mark.parametrize("seconds", [8, pytest.param(240, marks=pytest.mark.long)])
def test_a_soak_leaks_nothing_and_mixes_nothing(start_worker: StartWorker, seconds: int) -> None:
    worker = start_worker("--slots", "8")
    run_clients(worker, 3)  # caches and pools reach their final size
    before = memory(worker)
    tally = run_clients(worker, seconds)
    worker.wait_idle()
    assert not tally.faults, tally.faults[:5]
    assert tally.suffices, tally.outcomes
    assert memory(worker) - before < MEMORY_GROWTH_BYTES
    worker.wait_for_free_cells()
    assert not worker.logs("engine.crashed")


def run_clients(worker: WorkerProcess, seconds: float) -> Tally:
    """Run for this long, and until there is enough of everything."""
    tally, end = Tally(), time.monotonic() + seconds

    def goes_on() -> bool:
        return not tally.faults and (time.monotonic() < end or not tally.suffices)

    clients = [
        threading.Thread(target=be_a_client, args=(worker, random.Random(n), goes_on, tally))
        for n in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join(seconds + PATIENCE_S)
        assert not client.is_alive(), "a stream that does not end"
    return tally


def be_a_client(
    worker: WorkerProcess, chance: random.Random, goes_on: Callable[[], bool], tally: Tally
) -> None:
    with worker.client() as client:
        while goes_on():
            try:
                tally.outcomes[one_request(client, chance)] += 1
            except Exception as error:  # whatever it is, the test reports it and fails
                tally.faults.append(f"{type(error).__name__}: {error}")
                return


def one_request(client: httpx.Client, chance: random.Random) -> str:
    """Ask for a secret, or for a long story, and perhaps do not wait for the end."""
    country, secret = chance.choice(list(SECRETS.items()))
    asks = chance.random() < 0.6
    question = f"What is the capital of {country}?" if asks else "Tell me a story about a fox."
    leaves = None if asks else chance.choice(["left", "cancelled", None])
    body = {
        "job_id": new_job_id(),
        "prompt": f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
        "max_tokens": 24 if asks else 200 if leaves != "cancelled" else 800,
        "temperature": 0,
        # Otherwise a story may end before its cancel arrives.
        "ignore_eos": leaves == "cancelled",
        "cache_salt": chance.choice(["a", "b"]),
    }
    with client.stream("POST", "/execute", json=body) as response:
        if response.status_code == 503:
            return "refused"
        assert response.status_code == 200, response.read()
        chunks = response.iter_raw()
        seen = []
        if leaves is not None:
            seen = list(itertools.islice(chunks, chance.randint(1, 6)))
            if leaves == "left":
                return leaves
            # On an open connection, because creating a client takes longer than a story.
            answer = client.post("/cancel", json={"job_id": body["job_id"]})
            assert answer.status_code == 202
        stream = sse.collect([*seen, *chunks])
    if stream.events[-1]["type"] == "error":
        assert stream.error["code"] == "CANCELLED", stream.error
        return "cancelled"
    if asks:
        assert stream.text == f"The capital of {country} is {secret}.", stream.text
    return "answered"


def memory(worker: WorkerProcess) -> int:
    """Memory of all processes of the worker, with shared pages counted once."""
    return sum(process.memory_full_info().pss for process in worker.processes)
