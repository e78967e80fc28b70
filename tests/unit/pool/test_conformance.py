"""The conformance kit's judge, which names each violation, and its server."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest

from tests.support.pool_manager import PoolManager, serving
from tests.support.worker import until
from worker.pool import conformance
from worker.pool.rules import CALLBACK_FIELDS, HEARTBEAT_FIELDS, PoolMessage, judge

EXAMPLES: dict[Any, Any] = {
    str: "x",
    int: 1,
    list: ["text-gen"],
    bool: True,
    (int, float): 1.0,
    (str, list): "CPU",
}


COMMON = {"uri": "http://h:1", "incarnation": "i"}


def callback(**changes: Any) -> PoolMessage:
    payload = {name: EXAMPLES[kind] for name, kind in CALLBACK_FIELDS.items()}
    payload |= COMMON | {"protocol": "sse"} | changes
    return PoolMessage("callback", 0.0, payload, ready_status=200)


def beat(sequence: int, at: float = 0.0, **changes: Any) -> PoolMessage:
    payload = {name: EXAMPLES[kind] for name, kind in HEARTBEAT_FIELDS.items()}
    payload |= COMMON | {"status": "ready", "sequence": sequence} | changes
    return PoolMessage("heartbeat", at, payload)


def without(message: PoolMessage, name: str) -> PoolMessage:
    return replace(message, payload={k: v for k, v in message.payload.items() if k != name})


def test_a_conforming_sequence_of_messages_has_no_breach() -> None:
    life = [
        beat(1, 0.0, status="loading"),
        callback(),
        beat(2, 1.0),
        replace(beat(3, 2.0), accepted=False),
        beat(5, 3.0, status="busy"),
        beat(7, 3.1, status="draining"),
        beat(6, 3.2, status="busy"),  # the worker had given up on it
        beat(8, 3.3, status="draining"),  # an answer came too late
        beat(4, 9.2),  # the network delivered this one late
        beat(1, 9.0, incarnation="another"),
    ]
    assert judge(life) == []


def test_messages_are_sorted_by_the_time_of_their_arrival() -> None:
    with serving() as manager:
        for message in (beat(2, 1.0), beat(3, 1.0), beat(1, 0.5)):
            manager.record(message)
        assert [message.payload["sequence"] for message in manager.beats] == [1, 2, 3]
        assert manager.verdict() == []


@pytest.mark.parametrize(
    ("rule", "messages"),
    [
        ("callback payload", lambda: [without(callback(), "vram_bytes")]),
        ("callback payload", lambda: [callback(slots=True)]),
        ("callback payload", lambda: [callback(uri="h:1")]),
        ("callback payload", lambda: [callback(uri="http://[")]),
        ("callback payload", lambda: [callback(protocol="ws")]),
        ("callback payload", lambda: [replace(callback(), payload=None)]),
        ("callback once", lambda: [callback(), callback()]),
        ("callback after ready", lambda: [replace(callback(), ready_status=503)]),
        ("callback token", lambda: [replace(callback(), authorized=False)]),
        ("heartbeat payload", lambda: [beat(1, status="fine")]),
        ("heartbeat payload", lambda: [without(beat(1), "queued")]),
        ("sequence", lambda: [beat(2), beat(2)]),
        ("last beat", lambda: [beat(1, status="draining"), beat(2)]),
        ("interval", lambda: [beat(1), beat(2, 10.0)]),
        ("identity", lambda: [beat(1), beat(2, worker_id="y")]),
    ],
)
def test_each_breach_is_named(rule: str, messages: Callable[[], list[PoolMessage]]) -> None:
    assert rule in {breach.rule for breach in judge(messages())}


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"uri": "http://\\ud800/"}'])
def test_unreadable_bodies_are_answered_and_do_not_conform(body: bytes) -> None:
    with serving() as manager:
        assert httpx.post(f"{manager.url}/ready", content=body).status_code == 200
        # A message is judged once it is answered.
        verdict = f"{manager.url}/verdict"
        until(lambda: not httpx.get(verdict).json()["conforms"], lambda: "it conforms")


def post_and_close(manager: PoolManager, path: str, body: str, length: str = "") -> bytes:
    """Close the sending side behind the body; returns the answer."""
    head = f"POST {path} HTTP/1.1\r\nHost: m\r\nContent-Length: {length or len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(manager.server_address[1])), 60) as worker:
        worker.sendall((head + body).encode("latin-1"))
        worker.shutdown(socket.SHUT_WR)
        return b"".join(iter(partial(worker.recv, 100), b""))


def test_a_half_closed_client_is_answered_and_counted() -> None:
    with serving() as manager:
        assert b" 200 " in post_and_close(manager, "/heartbeat", json.dumps(beat(1).payload))
        manager.wait_for(n_beats=1)


def test_a_callback_that_was_given_up_may_be_sent_again() -> None:
    """Of a distant worker, which has closed its side, while its machine still takes an answer."""
    payload = callback(uri="http://127.0.0.1:1").payload
    with serving() as manager:
        assert b" 200 " in post_and_close(manager, "/ready", json.dumps(payload))
        for n_callbacks in (2, 3):
            httpx.post(f"{manager.url}/ready", json=payload)
            manager.wait_for(n_callbacks=n_callbacks)
            breaches = {breach.rule for breach in manager.verdict()}
            assert ("callback once" in breaches) == (n_callbacks == 3)


@pytest.mark.parametrize("length", ["\u00b2", "9" * 5000])
def test_an_invalid_content_length_is_refused(length: str) -> None:
    with serving() as manager:
        assert b" 400 " in post_and_close(manager, "/ready", "", length)


def test_a_ready_answer_without_an_end_does_not_hang_the_kit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as probe, contextlib.suppress(OSError):
                probe.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
                while True:
                    probe.sendall(bytes(1 << 16))

        answering = threading.Thread(target=answer)
        answering.start()
        assert conformance._probe({"uri": f"http://127.0.0.1:{listener.getsockname()[1]}"}) == 200
        answering.join(60)
        assert not answering.is_alive()


def test_huge_intervals_and_lone_surrogates_are_judged() -> None:
    assert judge([beat(1, interval_seconds=10**400), beat(2, 10.0)]) == []
    twice = judge([callback(incarnation="\ud800")] * 2)
    assert "\n".join(breach.detail for breach in twice).encode()
