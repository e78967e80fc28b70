"""A pool manager that only watches: `python -m worker.pool.conformance --port 9999`.

Start it, start any worker with `--callback-url http://127.0.0.1:9999/ready` and
`--heartbeat-url http://127.0.0.1:9999/heartbeat`, and it shows what arrives and whether it follows
the protocol; `GET /verdict` returns the verdict as JSON.

Each connection has a thread of its own.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import threading
import time
from bisect import insort
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import httpx

from worker.pool.rules import Breach, PoolMessage, judge

KINDS: dict[str, Literal["callback", "heartbeat"]] = {
    "/ready": "callback",
    "/heartbeat": "heartbeat",
}
_PROBE_SECONDS = 6.0
_BODY_LIMIT_BYTES = 1 << 20
_LENGTH_DIGITS = 7


class Manager(ThreadingHTTPServer):
    """Records the workers' messages. Replace `reply` to answer something other than 200."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        on_message: Callable[[PoolMessage], None] = lambda message: None,
    ) -> None:
        super().__init__((host, port), _Handler)
        self.token = token
        self.on_message = on_message
        self.reply: Callable[[BaseHTTPRequestHandler], int] = answer_ok
        self._messages: list[PoolMessage] = []
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{str(host)}:{port}"

    def record(self, message: PoolMessage) -> None:
        """Keep the messages in order of arrival: a connection's thread may be overtaken by another
        between its answer and this call."""
        with self._lock:
            insort(self._messages, message, key=lambda each: each.received_at)
        self.on_message(message)

    def messages(self, kind: str | None = None) -> list[PoolMessage]:
        with self._lock:
            return [each for each in self._messages if kind in (None, each.kind)]

    def verdict(self) -> list[Breach]:
        return judge(self.messages())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a worker that closes its connection early."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Manager
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        received_at = time.monotonic()
        kind = KINDS.get(self.path.split("?")[0].rstrip("/"))
        length = self.headers.get("Content-Length", "")
        is_number = length.isdecimal() and len(length) <= _LENGTH_DIGITS
        if kind is None or not is_number or int(length) > _BODY_LIMIT_BYTES:
            self.close_connection = True
            send_json(self, 404 if kind is None else 400, {"error": "not a worker's message"})
            return
        try:
            payload = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            payload = None
        expected = self.server.token
        authorized = expected is None or self.headers["Authorization"] == f"Bearer {expected}"
        ready_status = _probe(payload) if kind == "callback" else None
        has_given_up = _has_given_up(self.connection)
        accepted = 200 <= self.server.reply(self) < 300 and not has_given_up
        self.server.record(
            PoolMessage(kind, received_at, payload, authorized, accepted, ready_status)
        )

    def do_GET(self) -> None:
        if self.path != "/verdict":
            send_json(self, 404, {"error": "there is only /verdict"})
            return
        breaches = [{"rule": each.rule, "detail": each.detail} for each in self.server.verdict()]
        counts = {kind: len(self.server.messages(kind)) for kind in KINDS.values()}
        send_json(self, 200, {"conforms": not breaches, "breaches": breaches, "messages": counts})

    def log_message(self, format: str, *args: Any) -> None:
        """Print no log line: `on_message` shows the messages."""


def answer_ok(handler: BaseHTTPRequestHandler) -> int:
    send_json(handler, 200, {})
    return 200


def send_json(handler: BaseHTTPRequestHandler, status: int, body: Any) -> None:
    content = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def _has_given_up(connection: socket.socket) -> bool:
    """Whether the worker has closed its side and may not read an answer. A distant one's answer can
    still be sent then, as if it were accepted."""
    try:
        # The bytes below TLS, whose own `recv` cannot peek.
        return not socket.socket.recv(connection, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _probe(payload: Any) -> int | None:
    """The status of the sender's `/ready`: 0 without an answer, `None` without a URI."""
    uri = payload.get("uri") if isinstance(payload, dict) else None
    if not isinstance(uri, str) or not uri.startswith(("http://", "https://")):
        return None
    try:
        ready = f"{uri}/ready"
        with httpx.stream("GET", ready, timeout=_PROBE_SECONDS, trust_env=False) as answer:
            return answer.status_code  # without the body, which may be endless
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m worker.pool.conformance", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=9999, help="port to listen on; 0 = any")
    parser.add_argument("--token", help="the bearer token that workers must send")
    parser.add_argument("--duration", type=float, help="seconds to watch; else until Ctrl-C")
    options = parser.parse_args()
    try:
        manager = Manager(options.host, options.port, options.token, show)
    except OSError as error:
        print(f"Cannot listen on {options.host}:{options.port}: {error.strerror}.", file=sys.stderr)
        return 7
    thread = threading.Thread(target=manager.serve_forever, daemon=True)
    thread.start()
    print(f"Watching on {manager.url}: POST /ready, POST /heartbeat, GET /verdict", flush=True)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait(options.duration)
    manager.shutdown()
    breaches = manager.verdict()
    for breach in breaches:
        print(f"BREACH  {breach.rule}: {breach.detail}")
    n_callbacks, n_beats = (len(manager.messages(kind)) for kind in KINDS.values())
    print(f"{'does not conform' if breaches else 'conforms'}: {n_callbacks} callbacks, "
          f"{n_beats} heartbeats, {len(breaches)} breaches")  # fmt: skip
    return 1 if breaches or not manager.messages() else 0


def show(message: PoolMessage) -> None:
    payload = message.payload if isinstance(message.payload, dict) else {}
    shown = {
        key: payload.get(key)
        for key in ("worker_id", "status", "sequence", "running", "queued", "uri")
        if key in payload
    }
    print(f"{message.kind:<9} {json.dumps(shown)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
