"""The load client: raw sockets and one selector, because it shares the cores with the server.

While a load runs it only sends requests and stores what arrives with its time; the streams are
parsed when the load is over. Runs in the benchmark's process, on its one thread.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.bench.errors import BenchError

RECEIVE_BYTES = 1 << 16


@dataclass(slots=True)
class Recording:
    """What came back on one stream: raw pieces with their arrival times (`perf_counter`)."""

    sent_s: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    n_events_seen: int = 0
    ended: bool = False


Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """One stream of a load. It starts `at_s` after the load begins, or when its turn comes."""

    path: str
    body: Body | Callable[[Sequence[Recording]], Body]
    """The body, or a function that makes it from the recordings so far: it may need an answer."""
    at_s: float = 0.0
    start_after: tuple[int, int] | None = None
    """Starts after this number of events on another stream."""
    after_end: int | None = None
    """Starts when another stream has ended."""
    end_with: int | None = None
    """The connection is closed when another stream has ended."""


@dataclass(frozen=True, slots=True)
class Driven:
    recordings: list[Recording]
    wall_s: float
    client_cpu_s: float


def http_request(host: str, port: int, path: str, body: Mapping[str, Any]) -> bytes:
    payload = json.dumps(body, separators=(",", ":")).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nContent-Length: {len(payload)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + payload


def drive(host: str, port: int, requests: Sequence[Request], timeout_s: float) -> Driven:
    """Send all requests at once (or when their turn comes) and record until all have ended."""
    deadline = time.perf_counter() + timeout_s
    run = _Run(host, port, requests)
    cpu_before, wall_before = time.process_time(), time.perf_counter()
    run.began_s = wall_before
    try:
        run.start_due()
        while not run.done():
            left = deadline - time.perf_counter()
            if left <= 0:
                raise BenchError(f"A load did not end within {timeout_s:.0f} s.")
            run.wait(left)
    finally:
        run.close()
    wall_s = time.perf_counter() - wall_before
    return Driven(run.recordings, wall_s, time.process_time() - cpu_before)


class _Run:
    def __init__(self, host: str, port: int, requests: Sequence[Request]) -> None:
        self.address = (host, port)
        self.requests = requests
        # Written before the load where possible, so that this costs nothing while it runs.
        self.wires = [None if callable(r.body) else self._wire(r.path, r.body) for r in requests]
        self.began_s = 0.0
        self.recordings = [Recording() for _ in requests]
        self.sockets: dict[int, socket.socket] = {}
        self.waiting = list(range(len(requests)))
        self.selector = selectors.DefaultSelector()
        self.watched = {r.start_after[0] for r in requests if r.start_after is not None}

    def start_due(self) -> None:
        due = [i for i in self.waiting if self._is_due(i)]
        for index in due:
            self.waiting.remove(index)
            request = self.requests[index]
            if callable(request.body):
                self.wires[index] = self._wire(request.path, request.body(self.recordings))
            connection = socket.create_connection(self.address, timeout=10)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sockets[index] = connection
            self.selector.register(connection, selectors.EVENT_READ, index)
        for index in due:
            self.recordings[index].sent_s = time.perf_counter()
            self.sockets[index].sendall(self.wires[index] or b"")
            self.sockets[index].setblocking(False)

    def _wire(self, path: str, body: Body) -> bytes:
        return http_request(*self.address, path, body)

    def _is_due(self, index: int) -> bool:
        request = self.requests[index]
        if time.perf_counter() - self.began_s < request.at_s:
            return False
        if request.after_end is not None:
            return self.recordings[request.after_end].ended
        condition = request.start_after
        if condition is None:
            return True
        other = self.recordings[condition[0]]
        return other.n_events_seen >= condition[1] or other.ended

    def done(self) -> bool:
        return not self.sockets and not self.waiting

    def wait(self, timeout_s: float) -> None:
        elapsed_s = time.perf_counter() - self.began_s
        later = [self.requests[i].at_s for i in self.waiting if self.requests[i].at_s > elapsed_s]
        timeout_s = min([timeout_s, *(at_s - elapsed_s for at_s in later)])
        for key, _ in self.selector.select(timeout_s):
            index: int = key.data
            if index not in self.sockets:
                continue
            try:
                data = self.sockets[index].recv(RECEIVE_BYTES)
            except ConnectionResetError:
                data = b""
            recording = self.recordings[index]
            if not data:
                self._end(index)
                continue
            recording.pieces.append((time.perf_counter(), data))
            if index in self.watched:
                recording.n_events_seen += data.count(b"data:")
        if self.waiting:
            self.start_due()

    def _end(self, index: int) -> None:
        self._drop(index)
        for other, request in enumerate(self.requests):
            if request.end_with == index and other in self.sockets:
                self._drop(other)

    def _drop(self, index: int) -> None:
        connection = self.sockets.pop(index)
        self.selector.unregister(connection)
        connection.close()
        self.recordings[index].ended = True

    def close(self) -> None:
        for connection in self.sockets.values():
            connection.close()
        self.selector.close()
