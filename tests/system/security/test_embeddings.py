"""Embeddings are requests like any other: bounded, monitored, drained, cancelled with their
client."""

from __future__ import annotations

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.conftest import StartWorker
from tests.system.worker.test_embeddings import pooling_gguf

__all__ = ["pooling_gguf"]

BODY = {"model": "pooling", "input": ["One day", "the fox"]}


def test_a_stalled_embedding_is_served_by_the_next_engine(
    start_worker: StartWorker, pooling_gguf: Path
) -> None:
    worker = start_worker("--model", str(pooling_gguf), "--stall-timeout", "3")
    first = worker.engine_pid
    worker.freeze_engine()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(worker.post, "/v1/embeddings", BODY)
        worker.wait_status("/health", 503)
        assert answer.result().status_code == 200
    assert worker.engine_pid != first
    assert worker.metric('worker_requests_total{outcome="success"}') == 1
    assert worker.stop() == 0


def test_embeddings_are_bounded_cancelled_timed_out_and_drained(
    start_worker: StartWorker, pooling_gguf: Path
) -> None:
    """Limited in number and time; a stop refuses the next one."""
    worker = start_worker(
        *("--model", str(pooling_gguf), "--slots", "1", "--max-queued-requests", "2")
    )
    worker.freeze_engine()
    body = json.dumps(BODY).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    request = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
    clients = [socket.create_connection(("127.0.0.1", worker.port)) for _ in range(3)]
    for client in clients:
        client.sendall(request)
    worker.wait_working(3)
    refused = worker.post("/v1/embeddings", BODY)
    assert refused.status_code == 503 and "Retry-After" in refused.headers
    for client in clients:
        client.close()
    worker.wait_idle()
    worker.thaw_engine()
    assert worker.post("/v1/embeddings", BODY).status_code == 200
    assert worker.metric('worker_requests_total{outcome="cancelled"}') == 0, "none was accepted"
    assert worker.metric('worker_requests_rejected_total{code="CANCELLED"}') == 0, "nor refused"
    worker.freeze_engine()
    soon = {"X-Deadline": str(int(time.time() * 1000) + 500)}
    assert worker.post("/v1/embeddings", BODY, soon).status_code == 504
    worker.thaw_engine()
    assert worker.post("/v1/embeddings", BODY).status_code == 200
    worker.freeze_engine()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.post, "/v1/embeddings", BODY)
        worker.wait_working(1)
        worker.signal(signal.SIGTERM)
        worker.wait_status("/ready", 503)
        assert worker.post("/v1/embeddings", BODY).status_code == 503
        time.sleep(0.5)
        worker.thaw_engine()
        assert waiting.result().status_code == 200
    assert worker.wait() == 0
