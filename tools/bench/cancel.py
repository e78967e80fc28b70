"""How long the worker's cells stay in use after a cancel or a disconnect, according to /metrics.

Only the worker is measured, because only it makes a promise. Prefix reuse is off here, since
cached cells would count as used. Runs in the benchmark's process.
"""

from __future__ import annotations

import http.client
import random
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tools.bench.client import http_request
from tools.bench.errors import BenchError
from tools.bench.loads import JOIN_SHAPE, Metrics, text_of
from tools.bench.servers import HOST, RunningServer

TIMEOUT_S = 60.0
POLL_S = 0.002
FLAGS = ("--no-prefix-cache",)
PHASES = ("queued", "prefill", "decode")


class Gauges:
    """Reads the worker's gauges over one kept connection."""

    def __init__(self, port: int, limit_s: float = TIMEOUT_S) -> None:
        self._limit_s = limit_s
        self._connection = http.client.HTTPConnection(HOST, port, timeout=10)

    def read(self) -> dict[str, float]:
        self._connection.request("GET", "/metrics")
        lines = self._connection.getresponse().read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("worker_"))
        return {name: float(value) for name, value in pairs}

    def wait(self, name: str, wanted: Callable[[float], bool]) -> float:
        """Poll until the gauge has the wanted value; returns the time at which it was seen."""
        deadline = time.perf_counter() + self._limit_s
        while time.perf_counter() < deadline:
            if wanted(self.read()[name]):
                return time.perf_counter()
            time.sleep(POLL_S)
        raise BenchError(f"{name} did not reach its expected value within {self._limit_s:.0f} s.")

    def close(self) -> None:
        self._connection.close()


@dataclass(slots=True)
class Jobs:
    """Streams that were started and are read no further than needed."""

    port: int
    limit_s: float
    sockets: dict[str, socket.socket] = field(default_factory=dict)

    def start(self, job_id: str, prompt: str, n_out: int) -> None:
        body = {"job_id": job_id, "prompt": prompt, "max_tokens": n_out, "temperature": 0}
        connection = socket.create_connection((HOST, self.port), timeout=self.limit_s)
        connection.sendall(http_request(HOST, self.port, "/execute", body | {"ignore_eos": True}))
        self.sockets[job_id] = connection

    def read_until(self, job_id: str, mark: bytes, count: int) -> None:
        seen = b""
        while seen.count(mark) < count:
            piece = self.sockets[job_id].recv(1 << 16)
            if not piece:
                raise BenchError(f"A stream ended early: {seen[-300:].decode(errors='replace')}")
            seen += piece

    def disconnect(self, job_id: str) -> None:
        self.sockets.pop(job_id).close()

    def cancel(self, job_id: str) -> None:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=10)
        head = {"Content-Type": "application/json"}
        connection.request("POST", "/cancel", f'{{"job_id":"{job_id}"}}', head)
        status = connection.getresponse().status
        connection.close()
        if status != 202:
            raise BenchError(f"/cancel answered {status} for a running job.")

    def close(self) -> None:
        for job_id in list(self.sockets):
            self.disconnect(job_id)


def measure_cancel(server: RunningServer, rng: random.Random, words: Sequence[str]) -> Metrics:
    """One sample of each phase and each way to leave: milliseconds until the cells are free."""
    metrics: Metrics = {}
    for phase in PHASES:
        for way in ("cancel", "disconnect"):
            name = f"{way}_{phase}_ms"
            metrics[name] = _sample(server, phase, way, rng, words) * 1e3
    return metrics


def _sample(
    server: RunningServer, phase: str, way: str, rng: random.Random, words: Sequence[str]
) -> float:
    limit_s = TIMEOUT_S * server.kind.patience
    gauges, jobs = Gauges(server.port, limit_s), Jobs(server.port, limit_s)
    used = "worker_kv_cells_used"
    job_id = f"{phase}-{way}-{rng.getrandbits(64):x}"
    try:
        gauges.wait(used, lambda value: value == 0)
        gauge = "worker_queue_depth" if phase == "queued" else used
        if phase == "queued":
            for slot in range(JOIN_SHAPE.slots):
                jobs.start(f"{job_id}-{slot}", text_of(rng, words, 16), 2000)
            gauges.wait("worker_requests_running", lambda value: value == JOIN_SHAPE.slots)
            jobs.start(job_id, text_of(rng, words, 128), 64)
            gauges.wait(gauge, lambda value: value == 1)
        elif phase == "prefill":
            jobs.start(job_id, text_of(rng, words, 4000), 16)
            jobs.read_until(job_id, b"event: started", 1)
            gauges.wait("worker_requests_running", lambda value: value == 1)
        else:
            jobs.start(job_id, text_of(rng, words, 128), 2000)
            jobs.read_until(job_id, b"event: token", 16)
        left_s = time.perf_counter()
        if way == "cancel":
            jobs.cancel(job_id)
        else:
            jobs.disconnect(job_id)
        return gauges.wait(gauge, lambda value: value == 0) - left_s
    finally:
        jobs.close()
        gauges.close()
