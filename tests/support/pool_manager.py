"""A pool manager for tests: the conformance kit's server in a thread, with bad days on demand."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.worker import until
from worker.pool.conformance import Manager, send_json
from worker.pool.conformance import answer_ok as answer_ok
from worker.pool.rules import Breach, PoolMessage

Reply = Callable[[BaseHTTPRequestHandler], int]


class PoolManager(Manager):
    """`serving()` runs it; `reply` is one of the functions below."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.has_ended = threading.Event()

    def flags(self) -> tuple[str, ...]:
        return ("--callback-url", f"{self.url}/ready", *self.heartbeat_flags())

    def heartbeat_flags(self, interval_s: float = 0.2) -> tuple[str, ...]:
        return ("--heartbeat-url", f"{self.url}/heartbeat", "--heartbeat-interval", str(interval_s))

    @property
    def callbacks(self) -> list[PoolMessage]:
        return self.messages("callback")

    @property
    def beats(self) -> list[PoolMessage]:
        return self.messages("heartbeat")

    @property
    def statuses(self) -> list[str]:
        return [message.payload["status"] for message in self.beats]

    def verdict(self) -> list[Breach]:
        """Return the verdict, ignoring late heartbeats, which depend on the machine."""
        return [breach for breach in super().verdict() if breach.rule != "interval"]

    def wait_for(self, n_callbacks: int = 0, n_beats: int = 0) -> None:
        until(
            lambda: len(self.callbacks) >= n_callbacks and len(self.beats) >= n_beats,
            lambda: f"{len(self.callbacks)} callbacks, {len(self.beats)} beats",
        )

    def wait_accepted(self) -> None:
        """Wait for a callback that it has accepted; it counts a message after its answer."""
        until(lambda: any(m.accepted for m in self.callbacks), lambda: "none is counted")

    def wait_for_status(self, status: str) -> None:
        until(lambda: status in self.statuses, lambda: f"beats: {self.statuses}")


@contextmanager
def serving(
    port: int = 0, token: str | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[PoolManager]:
    manager = PoolManager(port=port, token=token)
    if tls is not None:
        manager.socket = tls.wrap_socket(
            manager.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=manager.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield manager
    finally:
        manager.has_ended.set()
        manager.shutdown()
        manager.server_close()
        thread.join(10)


# --- answers of a manager; each returns the status that counts ---


def answers(*statuses: int) -> Reply:
    """Answer with each status once, in order, then with 200."""
    waiting = list(statuses)

    def reply(handler: BaseHTTPRequestHandler) -> int:
        status = waiting.pop(0) if waiting else 200
        send_json(handler, status, {"answer": status})
        return status

    return reply


def always(status: int) -> Reply:
    return lambda handler: answers(status)(handler)


def answers_garbage(handler: BaseHTTPRequestHandler) -> int:
    handler.wfile.write(b"\x00\xff this is not HTTP \r\n\r\n" * 3)
    handler.close_connection = True
    return 0


def hangs(handler: BaseHTTPRequestHandler) -> int:
    """Hang for longer than any test lasts."""
    assert isinstance(handler.server, PoolManager)
    handler.server.has_ended.wait()
    handler.close_connection = True
    return 0


def hangs_up(handler: BaseHTTPRequestHandler) -> int:
    handler.close_connection = True
    return 0
