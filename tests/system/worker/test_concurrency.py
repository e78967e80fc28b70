"""Many concurrent streams, cancelled jobs and clients that disconnect."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support import clock, sse
from tests.support.worker import WorkerProcess, new_job_id, until

ANIMALS = "fox owl mouse bear frog hen cat dog".split()
PROMPTS = [f"Once upon a time, there was a {kind} {animal}" for kind in ("happy", "tiny")
           for animal in ANIMALS]  # fmt: skip


def test_sixteen_streams_get_the_tokens_that_each_gets_alone(worker: WorkerProcess) -> None:
    def run(prompt: str) -> list[int]:
        stream = worker.execute(prompt, temperature=0, max_tokens=48)
        assert stream.end["tokens_out"] == len(stream.ids)
        return stream.ids

    alone = [run(prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(run, PROMPTS))
    assert together == alone


def test_cancel_ends_one_stream_within_100_ms_and_no_other(worker: WorkerProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        fields: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}
        bystander = pool.submit(worker.execute, "One day", **fields)
        clock.soon(lambda: [time_to_cancel(worker, after_chunks=5) for _ in range(5)], 0.1)
        assert bystander.result().end["tokens_out"] == 900


def test_a_queued_job_is_cancelled_within_100_ms(worker: WorkerProcess) -> None:
    stop = threading.Event()
    # Sixteen run and sixteen wait, so that the queued job gets no slot.
    holders = [threading.Thread(target=hold, args=(worker, stop)) for _ in range(32)]
    for holder in holders:
        holder.start()
    try:
        until(lambda: worker.n_queued >= 16, lambda: "no 32 streams")
        clock.soon(lambda: [time_to_cancel(worker, after_chunks=0) for _ in range(5)], 0.1)
    finally:
        stop.set()
        for holder in holders:
            holder.join(120)
    worker.wait_idle()


def time_to_cancel(worker: WorkerProcess, after_chunks: int) -> float:
    """Return the seconds from the cancel to the end of a stream; a queued job sends no chunk."""
    job_id = new_job_id()
    fields: dict[str, Any] = {"job_id": job_id, "max_tokens": 1000, "ignore_eos": True}
    with worker.client() as client, worker.streaming("The sea", **fields) as response:
        client.get("/health")  # opens the connection
        chunks = response.iter_raw()
        seen = list(itertools.islice(chunks, after_chunks))
        before = time.monotonic()
        assert client.post("/cancel", json={"job_id": job_id}).status_code == 202
        stream = sse.collect([*seen, *chunks])
        took = time.monotonic() - before
    assert stream.error["code"] == "CANCELLED"
    if not after_chunks:
        assert [event["type"] for event in stream.events] == ["error"]
    return took


def hold(worker: WorkerProcess, stop: threading.Event) -> None:
    """Keep one slot busy until told otherwise."""
    while not stop.is_set():
        fields: dict[str, Any] = {"max_tokens": 1000, "ignore_eos": True}
        with worker.streaming("The moon", **fields) as response:
            for _ in response.iter_raw():
                if stop.is_set():
                    break
