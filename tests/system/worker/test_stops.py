"""Stops: streams finish, new work is refused, and the process is gone in time, always."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from tests.conftest import StartWorker
from tests.support import sse
from tests.support.worker import WorkerProcess, until


class Running:
    """One long stream on a thread."""

    def __init__(self, worker: WorkerProcess, max_tokens: int = 1000) -> None:
        self.streams: list[sse.Stream] = []
        self.thread = threading.Thread(target=self._run, args=(worker, max_tokens))
        self.thread.start()
        until(lambda: worker.get("/health").json()["running"] == 1, 60, lambda: "it does not run")

    def _run(self, worker: WorkerProcess, max_tokens: int) -> None:
        self.streams.append(worker.execute("One day", max_tokens=max_tokens, ignore_eos=True))

    def result(self) -> sse.Stream:
        self.thread.join(120)
        return self.streams[0]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "/shutdown"])
def test_running_streams_finish_and_new_work_is_refused(
    start_worker: StartWorker, how: str
) -> None:
    worker = start_worker()
    worker.freeze_engine()  # holds the stream open while we look around
    running = Running.__new__(Running)
    running.streams = []
    running.thread = threading.Thread(target=running._run, args=(worker, 40))
    running.thread.start()
    until(lambda: worker.get("/health").json()["queued"] == 1, 60, lambda: "it is not there")
    if how == "/shutdown":
        assert worker.post("/shutdown", {}).status_code == 202
    else:
        worker.signal(signal.Signals[how])
    until(lambda: worker.get("/ready").status_code == 503, 60, lambda: "still ready")
    assert worker.get("/ready").json()["state"] == "draining"
    refused = worker.post("/execute", {"job_id": "late", "prompt": "Hi"})
    assert refused.status_code == 503 and refused.json()["code"] == "SHUTTING_DOWN"
    worker.thaw_engine()
    assert running.result().end["tokens_out"] == 40
    assert worker.wait() == 0
    assert [line["event"] for line in worker.logs()][-1] == "worker.stopped"


def test_what_outlives_the_drain_gets_its_terminal_event(start_worker: StartWorker) -> None:
    worker = start_worker("--drain-timeout", "0.5")
    running = Running(worker)
    worker.freeze_engine()
    before = time.monotonic()
    worker.signal(signal.SIGTERM)
    stream = running.result()
    assert stream.error["code"] == "SHUTTING_DOWN"
    assert worker.wait() == 0
    # Half a second and the engine's end on a quiet machine; 5.5 s at most by the process's clock.
    assert 0.4 < time.monotonic() - before < 20, "a wedged engine holds nothing up"


def test_a_second_signal_stops_now(start_worker: StartWorker) -> None:
    worker = start_worker("--drain-timeout", "60")
    running = Running(worker)
    worker.freeze_engine()
    worker.signal(signal.SIGTERM)
    until(lambda: worker.get("/ready").status_code == 503, 60, lambda: "still ready")
    before = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert time.monotonic() - before < 20
    assert running.result().error["code"] == "SHUTTING_DOWN"


def test_a_stop_while_loading(start_worker: StartWorker) -> None:
    worker = start_worker(wait_ready=False)
    assert worker.stop() == 0
    assert worker.logs("worker.failed") == []


def test_a_reader_that_does_not_read_holds_nothing_up(start_worker: StartWorker) -> None:
    worker = start_worker("--drain-timeout", "1")
    with worker.streaming("One day", max_tokens=1000, ignore_eos=True):
        before = time.monotonic()
        assert worker.stop() == 0
        assert time.monotonic() - before < 20
