"""A real worker sleeps: its memory is given back, and the next request wakes it."""

from __future__ import annotations

import psutil

from tests.conftest import StartWorker
from tests.support.worker import until


def test_a_worker_that_sleeps_gives_its_memory_back_and_answers_the_same(
    start_worker: StartWorker,
) -> None:
    running = start_worker("--sleep-idle-seconds", "3600")
    before = running.execute("Once upon a time", max_tokens=12, temperature=0)
    assert running.post("/sleep", {}).json() == {"status": "sleeping"}
    until(lambda: not running.children(), 30, lambda: str(running.children()), running)
    assert running.get("/is_sleeping").json() == {"is_sleeping": True}
    assert running.get("/ready").json() == {"ready": True, "state": "sleeping"}
    health = running.get("/health").json()
    assert (health["status"], health["state"], health["resident"]) == (
        "healthy",
        "sleeping",
        False,
    )
    assert running.get("/props").json()["is_sleeping"] is True
    assert running.get("/status").json()["memory"] == []
    assert psutil.Process(running.pid).memory_full_info().uss < 60 * 2**20
    after = running.execute("Once upon a time", max_tokens=12, temperature=0)
    assert after.text == before.text
    assert running.get("/health").json()["state"] == "ready"
    assert not running.get("/info").json()["engine_crashes"]
