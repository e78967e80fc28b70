"""The client and the stream reader record what a server sent, and when."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import pytest

from tools.bench.client import Recording, Request, drive
from tools.bench.errors import BenchError
from tools.bench.streams import events, token_stream

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
COMPLETION = [
    {"choices": [{"text": "one", "finish_reason": None}]},
    {"choices": [{"text": " zwölf", "finish_reason": None}]},
    {"choices": [{"text": "", "finish_reason": "length"}]},
    {"choices": [], "usage": {"completion_tokens": 2}},
]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def completion_wire() -> bytes:
    lines = [json.dumps(event) for event in COMPLETION] + ["[DONE]"]
    return HEAD + b"".join(chunk(f"data: {line}\n\n".encode()) for line in lines) + chunk(b"")


def recorded(wire: bytes, *cuts: int) -> Recording:
    """Return the bytes in pieces; a piece's time is its index."""
    pieces = [wire[a:b] for a, b in pairwise([0, *cuts, len(wire)])]
    return Recording(0.0, [(float(i), piece) for i, piece in enumerate(pieces) if piece])


def test_a_stream_reads_the_same_wherever_the_network_cuts_it() -> None:
    wire = completion_wire()
    for cut in range(1, len(wire)):
        stream = token_stream(recorded(wire, cut))
        assert (stream.text, stream.n_tokens, stream.finish_reason) == ("one zwölf", 2, "length")


def test_an_event_has_the_time_of_the_piece_that_completed_it() -> None:
    wire = completion_wire()
    end_of_first = wire.index(b"\n\n", len(HEAD)) + 4
    stream = token_stream(recorded(wire, len(HEAD) + 5, end_of_first))
    assert stream.token_times_s == (1.0, 2.0)
    assert stream.ttft_s == 1.0
    assert stream.gaps_s == [1.0]


def test_an_execute_stream_is_read_by_its_own_events() -> None:
    sent = [
        ("started", {"type": "started", "job_id": "a"}),
        ("token", {"type": "token", "t": "A", "i": 0}),
        ("metrics", {"type": "metrics", "tokens_out": 1}),
        ("token", {"type": "token", "t": "b", "i": 1}),
        ("end", {"type": "end", "tokens_out": 2, "stop_reason": "MAX_TOKENS"}),
    ]
    body = "".join(f"event: {name}\r\ndata: {json.dumps(data)}\r\n\r\n" for name, data in sent)
    wire = b"HTTP/1.1 200 OK\r\n\r\n: keepalive\n\n" + body.encode()
    stream = token_stream(recorded(wire))
    assert (stream.text, stream.n_tokens, stream.finish_reason) == ("Ab", 2, "MAX_TOKENS")
    assert [name for _, name, _ in events(recorded(wire))] == [name for name, _ in sent]


def test_a_refusal_and_an_error_event_are_reported_not_measured() -> None:
    refusal = b'HTTP/1.1 503 Service Unavailable\r\n\r\n{"code":"QUEUE_FULL"}'
    with pytest.raises(BenchError, match="503.*QUEUE_FULL"):
        token_stream(recorded(refusal))
    failing = HEAD + chunk(b'event: error\ndata: {"type":"error","code":"CANCELLED"}\n\n')
    with pytest.raises(BenchError, match="CANCELLED"):
        token_stream(recorded(failing))
    with pytest.raises(BenchError, match="without any token"):
        token_stream(recorded(HEAD + chunk(b"data: [DONE]\n\n") + chunk(b"")))


class _Handler(BaseHTTPRequestHandler):
    """Sends the requested number of events, with a pause after each, but none before the requested
    number of requests has arrived."""

    server: _Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.came:
            self.server.n_requests += 1
            self.server.came.notify_all()
            self.server.came.wait_for(lambda: self.server.n_requests >= body.get("together", 1))
        self.send_response(200)
        self.end_headers()
        try:
            for number in range(body["n"]):
                line = {"choices": [{"text": f"{number} "}]}
                self.wfile.write(f"data: {json.dumps(line)}\n\n".encode())
                time.sleep(body["pause_s"])
        except (BrokenPipeError, ConnectionResetError):
            return

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the test's output is its result."""


class _Server(ThreadingHTTPServer):
    # Connections beyond the backlog of five retry after one second, and after three more.
    request_queue_size = 64
    n_requests = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.came = threading.Condition()


@pytest.fixture
def port() -> Iterator[int]:
    server = _Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_client_records_streams_side_by_side(port: int) -> None:
    counts = [3, 5, 1] * 10
    fields = {"pause_s": 0.01, "together": len(counts)}
    requests = [Request("/", {"n": n, **fields}) for n in counts]
    driven = drive("127.0.0.1", port, requests, timeout_s=60)
    streams = [token_stream(recording) for recording in driven.recordings]
    assert [len(stream.token_times_s) for stream in streams] == counts
    assert all(stream.ttft_s > 0 for stream in streams)


def test_a_stream_joins_after_events_of_another_and_ends_it(port: int) -> None:
    running = Request("/", {"n": 10_000, "pause_s": 0.005}, end_with=1)
    joiner = Request("/", {"n": 2, "pause_s": 0.01}, start_after=(0, 10))
    driven = drive("127.0.0.1", port, [running, joiner], timeout_s=45)
    first, second = (token_stream(recording) for recording in driven.recordings)
    assert sum(at < second.sent_s for at in first.token_times_s) >= 10
    assert len(second.token_times_s) == 2
    assert len(first.token_times_s) < 10_000


def test_a_load_that_hangs_is_given_up(port: int) -> None:
    with pytest.raises(BenchError, match="did not end"):
        drive("127.0.0.1", port, [Request("/", {"n": 2, "pause_s": 2.0})], timeout_s=0.2)
