"""A thousand connections at once, and clients that do not read what they asked for."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import psutil
import pytest

from tests import ROOT
from tests.support import clock
from tests.support.scripted_api import ScriptedFactory, Step, story
from tests.support.sse import collect
from tests.support.worker import WorkerProcess, asking, until
from worker.wire.messages import Started, Token

HEADERS = "host: localhost\r\ncontent-type: application/json\r\n"
CROWD = 1000
MODULE = [sys.executable, "-m", "tests.process.api.latency_probe"]


@contextmanager
def health_times(worker: WorkerProcess) -> Iterator[dict[str, list[float]]]:
    """Measure `/health` and a server that does nothing, while the block runs."""

    def spawn(argument: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*MODULE, argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    times: dict[str, list[float]] = {}
    control = spawn("serve")
    assert control.stdout
    port = int(control.stdout.readline())
    probes = {"health": spawn(str(worker.port)), "control": spawn(str(port))}
    yield times
    for name, process in probes.items():
        output, _ = process.communicate(timeout=120)
        times[name] = sorted(json.loads(output))
    control.communicate(timeout=120)


def p99(times: list[float]) -> float:
    return times[int(len(times) * 0.99)]


async def one_of_the_crowd(port: int, number: int) -> bytes:
    """A whole answer, over a connection of its own and without the overhead of a client library."""
    body = json.dumps(
        {"job_id": f"crowd-{port}-{number}", "prompt": "Once upon a time", "max_tokens": 4}
        | {"temperature": 0}
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /execute HTTP/1.1\r\n{HEADERS}content-length: {len(body)}\r\n"
    writer.write(head.encode() + b"connection: close\r\n\r\n" + body)
    answer = await reader.read(-1)
    writer.close()
    head_bytes, _, rest = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head_bytes:
        rest = unchunked(rest)
    return head_bytes + b"\r\n\r\n" + rest


def unchunked(body: bytes) -> bytes:
    parts: list[bytes] = []
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            assert body == b"\r\n", "the answer ends in the middle"
            return b"".join(parts)
        parts.append(body[:length])
        body = body[length + 2 :]


async def crowd(port: int) -> list[bytes]:
    return await asyncio.gather(*(one_of_the_crowd(port, i) for i in range(CROWD)))


@pytest.mark.parametrize(
    "limit_ms",
    [
        # A blocked event loop exceeds this even on a busy machine.
        200,
        # The target, for an idle machine.
        pytest.param(10, marks=pytest.mark.long),
    ],
)
def test_a_thousand_connections_at_once(worker: WorkerProcess, limit_ms: float) -> None:
    process = psutil.Process(worker.pid)
    asyncio.run(crowd(worker.port))  # a first round, because allocators keep memory
    worker.wait_idle()
    before = process.memory_info().rss
    for _ in range(3):  # on a shared machine, the best of three rounds shows the worker's cost
        with health_times(worker) as times:
            time.sleep(0.5)
            answers = asyncio.run(crowd(worker.port))
            grown = process.memory_info().rss - before
        outcomes = check_answers(answers)
        latencies = {
            name: f"p50 {all_[len(all_) // 2]:.2f}, p99 {p99(all_):.2f} ms"
            for name, all_ in times.items()
        }
        print(f"{dict(outcomes)}, {grown / 2**20:.1f} MiB more, {latencies}")
        assert grown < 50 * 2**20, f"{grown} bytes more"
        worker.wait_idle()
        # Delay that the machine adds to any server does not count.
        late_ms = p99(times["health"]) - p99(times["control"])
        if clock.within(late_ms, limit_ms, time.monotonic):
            return
    pytest.fail(f"/health waited in each of the rounds, {latencies} in the last")


def check_answers(answers: list[bytes]) -> Counter[str]:
    """Each client got the right text or a 503 that says when to retry."""
    outcomes: Counter[str] = Counter()
    for answer in answers:
        head, _, body = answer.partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 200"):
            stream = collect([body])
            assert stream.text == ", there was a" and stream.end["stop_reason"] == "MAX_TOKENS"
            outcomes["served"] += 1
        else:
            assert head.startswith(b"HTTP/1.1 503"), head
            assert json.loads(body)["code"] == "QUEUE_FULL"
            assert b"retry-after: " in head
            outcomes["refused"] += 1
    assert outcomes["served"] >= 16 and outcomes.total() == CROWD
    return outcomes


@pytest.fixture
def frozen(worker: WorkerProcess) -> Iterator[WorkerProcess]:
    """The shared worker, whose engine reads nothing until it is thawed."""
    worker.wait_idle()
    worker.freeze_engine()
    yield worker
    worker.thaw_engine()


def test_a_request_whose_client_leaves_before_the_engine_reads_it_ends_as_499_and_is_no_refusal(
    frozen: WorkerProcess,
) -> None:
    worker = frozen
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "b", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "c"}], "n": 2}),
        ("/execute", {"prompt": "d", "job_id": "d"}),
        ("/v1/inference", {"prompt": "e", "job_id": "e"}),
    ]

    def refused() -> list[str]:
        lines = worker.get("/metrics").text.splitlines()
        counters = [line for line in lines if line.startswith("worker_requests_rejected_total")]
        return counters + [str(each) for each in worker.get("/status").json()["refusals"]]

    def statuses() -> list[int]:
        lines = worker.logs("request.answered")
        return [each["status"] for each in lines if each["correlation_id"] == "leaves"]

    before = refused()
    with ExitStack() as clients:
        for path, body in (*requests, ("/tokenize", {"content": "f"})):
            clients.enter_context(asking(worker.port, path, body, {"X-Correlation-Id": "leaves"}))
        worker.wait_queued(6)
    worker.wait_queued(0)
    until(lambda: len(statuses()) == 6, lambda: worker.stderr[-2000:], worker)
    assert set(statuses()) == {499} and refused() == before
    kept = {"X-Conversation-Id": "kept"}
    with asking(worker.port, "/v1/completions", {**requests[1][1], "max_tokens": 4}, kept):
        worker.wait_queued(1)
    with asking(worker.port, *requests[0]):
        worker.wait_queued(2)
    worker.wait_queued(1)  # the clients that left after it are gone; its own reader may come back
    worker.thaw_engine()
    for path, body in requests[3:]:
        assert worker.post(path, {**body, "max_tokens": 4}).status_code == 200
    assert "data: [DONE]" in worker.get("/v1/stream?conv_id=kept").text


def test_a_client_that_stops_reading_is_cut_off_and_delays_no_other(
    scripted: ScriptedFactory,
) -> None:
    worker = scripted(slow_reader_timeout=0.5)
    # Megabytes for each of two choices: more than buffers hold.
    much: list[Step] = [[Token(0, "x" * 2**16, (1,))]] * 200
    worker.supervisor.script = [[Started(0, 0)], *much, 60.0]
    body = json.dumps({"prompt": "Once", "stream": True, "n": 2}).encode()
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", worker.port))
        head = f"POST /v1/completions HTTP/1.1\r\n{HEADERS}content-length: {len(body)}\r\n\r\n"
        lazy.sendall(head.encode() + body)
        until(lambda: len(worker.supervisor.jobs) == 2, lambda: "not started")
        worker.supervisor.script = story("a")
        other = httpx.post(f"{worker.base_url}/v1/inference", json={"prompt": "Once"})
        assert other.json()["text"] == "a"
        slow_readers = "worker_slow_readers_total"
        until(lambda: worker.metrics.value(slow_readers) == 1, lambda: "it is not cut")
        until(lambda: len(worker.supervisor.cancelled) == 2, lambda: "jobs go on")
        received = b""
        while chunk := lazy.recv(65536):
            received += chunk
        assert received and b"[DONE]" not in received, "cut, and not served to the end"
