"""The real engine process dies or stands still; what its users see, and how it comes back."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.conftest import StartWorker
from tests.support import sse
from tests.support.worker import WorkerProcess, new_job_id, until

LONG = {"max_tokens": 1000, "ignore_eos": True}


def in_flight(running: WorkerProcess, n: int) -> None:
    until(
        lambda: running.get("/health").json()["running"] >= n,
        10,
        lambda: str(running.get("/health").json()),
        running,
    )


def crash_in_mid_stream(running: WorkerProcess, number: signal.Signals) -> sse.Stream:
    """Kill the engine once tokens flow; the stream must end within a second."""
    with running.streaming(f"One day {new_job_id()}", **LONG) as response:
        chunks = response.iter_raw()
        seen = [next(chunks) for _ in range(3)]
        os.kill(running.engine_pid, number)
        before = time.monotonic()
        stream = sse.collect([*seen, *chunks])
        assert time.monotonic() - before < 1
    return stream


@pytest.mark.parametrize("name", ["SIGABRT", "SIGSEGV", "SIGKILL"])
def test_a_death_costs_the_streams_in_flight_and_nothing_more(
    start_worker: StartWorker, name: str
) -> None:
    running = start_worker()
    first = running.engine_pid
    stream = crash_in_mid_stream(running, signal.Signals[name])
    assert stream.error["code"] == "ENGINE_CRASHED" and stream.error["retriable"] is True
    ready = running.get("/ready")
    assert ready.status_code == 503 and ready.json()["state"] == "recovering"
    assert running.get("/health").status_code == 200
    refused = running.post("/execute", {"job_id": "x", "prompt": "Hi"})
    assert refused.status_code == 503 and refused.json()["retriable"] is True
    running.wait_ready(20)
    assert running.engine_pid != first
    assert name in running.wait_log("engine.crashed")["how"]
    assert running.execute("Once", max_tokens=5, ignore_eos=True).end["tokens_out"] >= 1
    assert running.metric("worker_engine_crashes_total") == 1
    assert running.metric("worker_engine_respawns_total") == 1
    assert len(running.children()) == 1
    assert running.stop() == 0


def test_requests_that_had_not_started_are_served_by_the_next_engine(
    start_worker: StartWorker,
) -> None:
    running = start_worker("--slots", "1")
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(crash_after_queueing, running, 3)
        in_flight(running, 1)
        queued = [
            pool.submit(running.execute, f"One day, number {n}", max_tokens=5, ignore_eos=True)
            for n in range(3)
        ]
        assert first.result(30).error["code"] == "ENGINE_CRASHED"
        assert all(each.result(30).end["tokens_out"] >= 1 for each in queued)
    assert running.stop() == 0


def crash_after_queueing(running: WorkerProcess, n_queued: int) -> sse.Stream:
    with running.streaming("The lake", **LONG) as response:
        chunks = response.iter_raw()
        seen = [next(chunks)]
        os.kill(running.engine_pid, signal.SIGSTOP)  # so that the queue cannot drain meanwhile
        until(
            lambda: running.get("/health").json()["queued"] == n_queued,
            10,
            lambda: str(running.get("/health").json()),
        )
        os.kill(running.engine_pid, signal.SIGKILL)
        return sse.collect([*seen, *chunks])


def test_a_request_that_was_there_twice_is_refused(start_worker: StartWorker) -> None:
    running = start_worker()
    poison = "The poison"
    for _ in range(2):
        with running.streaming(poison, **LONG) as response:
            chunks = response.iter_raw()
            seen = [next(chunks)]
            os.kill(running.engine_pid, signal.SIGABRT)
            assert sse.collect([*seen, *chunks]).error["code"] == "ENGINE_CRASHED"
        running.wait_ready(20)
    again = {"job_id": new_job_id(), "prompt": poison, "seed": 5, **LONG}
    refused = running.post("/execute", again)
    assert refused.status_code == 400 and refused.json()["code"] == "INVALID_REQUEST"
    assert refused.json()["errors"][0]["constraint"] == "quarantine"
    assert running.metric("worker_requests_quarantined_total") == 1
    assert running.execute("Once", max_tokens=5, ignore_eos=True).end["tokens_out"] >= 1
    assert running.stop() == 0


def test_a_crash_loop_ends_the_worker(start_worker: StartWorker) -> None:
    running = start_worker("--crash-limit", "2")
    for _ in range(2):
        os.kill(running.engine_pid, signal.SIGKILL)
        until(lambda: not running.is_ready(), 5, lambda: "still ready")
        running.wait_ready(20)
    os.kill(running.engine_pid, signal.SIGKILL)
    assert running.wait(15) == 8
    assert running.logs("worker.failed")[0]["code"] == "ENGINE_CRASH_LOOP"
    assert "3 times" in running.stderr.strip().splitlines()[-1]


def test_a_stall_is_unhealthy_then_replaced(start_worker: StartWorker) -> None:
    running = start_worker("--stall-timeout", "1.5")
    first = running.engine_pid
    with running.streaming("One day", **LONG) as response:
        chunks = response.iter_raw()
        seen = [next(chunks)]
        os.kill(first, signal.SIGSTOP)
        stopped_at = time.monotonic()
        assert running.get("/health").status_code == 200, "not yet"
        until(lambda: running.get("/health").status_code == 503, 3, lambda: "healthy all the time")
        assert time.monotonic() - stopped_at >= 1.4
        stream = sse.collect([*seen, *chunks])
    assert stream.error["code"] == "ENGINE_CRASHED"
    running.wait_ready(20)
    assert running.engine_pid != first and not psutil.pid_exists(first)
    assert running.wait_log("engine.stalled")["pid"] == first
    assert running.get("/health").status_code == 200
    assert running.stop() == 0


def test_idle_and_slow_but_moving_are_healthy(start_worker: StartWorker) -> None:
    """Slow: the engine gets a tenth of a core, and a prompt as long as the context."""
    running = start_worker("--stall-timeout", "2", "--micro-batch", "16", "--batch", "32")
    time.sleep(2.5)
    assert running.get("/health").status_code == 200
    stop = threading.Event()
    slowing = threading.Thread(target=slow_down, args=(running.engine_pid, stop))
    slowing.start()
    try:
        with ThreadPoolExecutor(1) as pool:
            words = " ".join(["One day the fox went to the lake."] * 80)
            job = pool.submit(running.execute, words, max_tokens=30, ignore_eos=True)
            statuses = set()
            while not job.done():
                statuses.add(running.get("/health").status_code)
                time.sleep(0.02)
            assert job.result().end["tokens_out"] == 30
    finally:
        stop.set()
        slowing.join()
    assert statuses == {200}
    assert running.logs("engine.stalled") == []
    assert running.stop() == 0


def slow_down(pid: int, stop: threading.Event) -> None:
    while not stop.is_set():
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.09)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)


def test_a_pause_of_the_worker_itself_is_no_stall(start_worker: StartWorker) -> None:
    """As when a laptop sleeps or a debugger holds it: it must not blame the engine."""
    running = start_worker("--stall-timeout", "0.5")
    with running.streaming("One day", **LONG) as response:
        chunks = response.iter_raw()
        seen = [next(chunks)]
        running.signal(signal.SIGSTOP)
        time.sleep(3)
        running.signal(signal.SIGCONT)
        stream = sse.collect([*seen, *chunks])
    assert stream.end["tokens_out"] == 1000
    assert running.logs("engine.stalled") == []
    assert running.stop() == 0


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_no_engine_outlives_a_parent_that_was_killed(
    start_worker: StartWorker, stopped: bool
) -> None:
    running = start_worker()
    (engine,) = running.children()
    if stopped:
        engine.suspend()
    running.kill()
    until(
        lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE,
        5,
        lambda: f"the engine is {engine.status()}",
    )
