"""Many streams at once, jobs that are cancelled and clients that leave."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support import sse
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


def test_more_streams_than_slots_are_queued_and_served(worker: WorkerProcess) -> None:
    with ThreadPoolExecutor(40) as pool:
        streams = list(
            pool.map(lambda n: worker.execute(PROMPTS[n % 16], max_tokens=10, seed=n), range(40))
        )
    assert all(stream.end["tokens_out"] <= 10 for stream in streams)


def test_cancel_ends_one_stream_within_100_ms_and_no_other(worker: WorkerProcess) -> None:
    bystander: list[sse.Stream] = []
    thread = threading.Thread(
        target=lambda: bystander.append(
            worker.execute("One day", max_tokens=900, ignore_eos=True, temperature=0)
        )
    )
    thread.start()
    job_id = new_job_id()
    with worker.streaming("The sun", job_id=job_id, max_tokens=1000, ignore_eos=True) as response:
        chunks = response.iter_raw()
        seen = [next(chunks) for _ in range(5)]
        before = time.monotonic()
        assert worker.post("/cancel", {"job_id": job_id}).status_code == 202
        stream = sse.collect([*seen, *chunks])
        assert time.monotonic() - before < 0.1
    assert stream.error["code"] == "CANCELLED"
    assert worker.post("/cancel", {"job_id": job_id}).status_code == 202
    assert worker.post("/cancel", {"job_id": "never-seen"}).status_code == 404
    thread.join(30)
    assert bystander[0].end["tokens_out"] == 900


def test_a_queued_job_is_cancelled_as_fast(worker: WorkerProcess) -> None:
    stop = threading.Event()
    holders = [threading.Thread(target=hold, args=(worker, stop)) for _ in range(16)]
    for holder in holders:
        holder.start()
    try:
        until(lambda: worker.get("/health").json()["running"] == 16, 10, lambda: "no 16 streams")
        job_id = new_job_id()
        with worker.streaming("The sea", job_id=job_id) as response:
            before = time.monotonic()
            assert worker.post("/cancel", {"job_id": job_id}).status_code == 202
            stream = sse.collect(response.iter_raw())
            assert time.monotonic() - before < 0.1
        assert [event["type"] for event in stream.events] == ["error"]
        assert stream.error["code"] == "CANCELLED"
    finally:
        stop.set()
        for holder in holders:
            holder.join(30)
    worker.wait_idle()


def hold(worker: WorkerProcess, stop: threading.Event) -> None:
    """Keep one slot busy until told otherwise."""
    while not stop.is_set():
        fields: dict[str, Any] = {"max_tokens": 1000, "ignore_eos": True}
        with worker.streaming("The moon", **fields) as response:
            for _ in response.iter_raw():
                if stop.is_set():
                    break


def test_a_client_that_leaves_frees_its_sequence(worker: WorkerProcess) -> None:
    worker.wait_idle()
    body = b'{"job_id":"%s","prompt":"The lake","max_tokens":1000,"ignore_eos":true}'
    for _ in range(4):
        with socket.create_connection(("127.0.0.1", worker.port)) as connection:
            content = body % new_job_id().encode()
            head = f"POST /execute HTTP/1.1\r\nHost: w\r\nContent-Length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)
            assert b"200 OK" in connection.recv(100)
    worker.wait_idle(1.0)

    def only_reusable_cells_are_left() -> bool:
        used = worker.metric("worker_kv_cells_used")
        return used == worker.metric("worker_kv_cells_cached")

    until(only_reusable_cells_are_left, 2, lambda: worker.get("/metrics").text)


def test_health_answers_fast_while_the_engine_works(worker: WorkerProcess) -> None:
    stop = threading.Event()
    holders = [threading.Thread(target=hold, args=(worker, stop)) for _ in range(8)]
    for holder in holders:
        holder.start()
    try:
        times = []
        with worker.client() as client:
            for _ in range(50):
                before = time.monotonic()
                assert client.get("/health").status_code == 200
                times.append(time.monotonic() - before)
        assert sorted(times)[len(times) // 2] < 0.05
    finally:
        stop.set()
        for holder in holders:
            holder.join(30)
