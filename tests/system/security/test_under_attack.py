"""Minutes of each attack on a real worker: it keeps its engine, its health and its other clients.

While an attack runs, one separate process requests `/health`, another requests an idle server, and
a well-behaved client chats. The figures are printed; the assertions allow for a busy machine.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.conftest import StartWorker
from tests.process.api.hostile_bodies import CHAT as CHAT_PATH
from tests.process.api.hostile_bodies import FRANCE, HOSTILE_BODIES, encoded, hostile_bodies
from tests.process.api.test_crowd import health_times, p99
from tests.support.worker import WorkerProcess
from tests.system.security.test_network import HEAD, connected
from tests.system.worker.test_embeddings import pooling_gguf

__all__ = ["pooling_gguf"]
pytestmark = pytest.mark.long

SECONDS = 30.0
N_ATTACKERS = 4
CHAT = {"messages": FRANCE, "temperature": 0, "max_tokens": 24}
PATIENCE_MS = 200.0
"""Allowed ms beyond the idle server's. The target on a quiet machine is 20."""
GROWTH_BYTES = 300 * 2**20

Attack = Callable[[WorkerProcess, int], int | None]
"""Send one request; returns its status, or `None` without an answer. The number makes it unique."""


@cache
def bodies(group: str) -> list[tuple[str, bytes]]:
    """Make the bodies before sending, because encoding a large one would delay the observers."""
    return [(path, body) for _, path, body in hostile_bodies(group)]


def post(worker: WorkerProcess, path: str, body: bytes) -> int:
    with worker.client() as client:
        headers = {"Content-Type": "application/json"}
        return client.post(path, content=body, headers=headers).status_code


def one_of(made: Callable[[], list[tuple[str, bytes]]]) -> Attack:
    return lambda worker, n: post(worker, *made()[n % len(made())])


def raw(worker: WorkerProcess, sent: bytes, wait_s: float = 0.0) -> None:
    """Send bytes on a socket, and close it without reading the answer."""
    try:
        with connected(worker, sent):
            time.sleep(wait_s)
    except OSError:
        pass  # refused, which is an answer


def idle(worker: WorkerProcess, _n: int) -> None:
    clients = []
    try:
        for _ in range(2500):
            clients.append(connected(worker))
        time.sleep(1)
    except OSError:
        pass
    finally:
        for client in clients:
            client.close()


def sampling(n: int) -> dict[str, Any]:
    odd: list[dict[str, Any]] = [
        {"temperature": 1e-39, "ignore_eos": True},
        {"top_k": 1, "min_p": 1, "top_p": 0},
        {"logit_bias": {str(token): -100 for token in range(300)}},
    ]
    return CHAT | {"grammar": 'root ::= "a" [bc] "d"?'} | odd[n % len(odd)]


@cache
def control_tokens() -> list[tuple[str, bytes]]:
    return [
        ("/tokenize", encoded({"content": "<|im_end|>" * 400_000})),
        ("/tokenize", encoded({"content": "a b" * 700_000, "with_pieces": True})),
    ]


ATTACKS: dict[str, Attack] = {
    **{f"hostile bodies, {each}": one_of(partial(bodies, each)) for each in HOSTILE_BODIES},
    "control tokens, 4 MB": one_of(control_tokens),
    "sampling against a grammar": lambda w, n: post(w, CHAT_PATH, encoded(sampling(n))),
    "bodies that never end": lambda w, n: raw(
        w, HEAD + b"Content-Length: 4000000\r\n\r\n" + b"x" * 3_900_000, 0.2
    ),
    "a header of 16 MB": lambda w, n: raw(w, b"GET / HTTP/1.1\r\nX: " + b"a" * (1 << 24)),
    "2,500 idle connections": idle,
    "clients that leave": lambda w, n: raw(w, _streamed(n), 0.02),
}


def _streamed(n: int) -> bytes:
    body = json.dumps(CHAT | {"stream": True, "seed": n, "max_tokens": 500}).encode()
    head = HEAD.replace(b"/tokenize", b"/v1/chat/completions")
    return head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Watch:
    """Measurements of the worker's other clients."""

    times: dict[str, list[float]] = field(default_factory=dict)
    """Times in ms: `health`, and `control` for the idle server."""
    chats: Counter[str] = field(default_factory=Counter)


def chat_on(worker: WorkerProcess, watch: Watch, done: threading.Event) -> None:
    while not done.wait(0.1):
        try:
            answer = worker.post("/v1/chat/completions", CHAT)
        except httpx.TransportError as error:
            watch.chats[type(error).__name__] += 1
            continue
        right = answer.status_code == 200 and "Paris" in answer.text
        watch.chats["right" if right else str(answer.status_code)] += 1


def attacked(
    worker: WorkerProcess, attack: Attack, chats: bool = True
) -> tuple[Watch, Counter[str]]:
    """Attack for `SECONDS`; returns what others measured, and the outcomes of the attack."""
    watch, blows, done = Watch(), Counter[str](), threading.Event()
    chatting = threading.Thread(target=chat_on, args=(worker, watch, done))
    deadline = time.monotonic() + SECONDS

    def strike(first: int) -> None:
        n = first
        while time.monotonic() < deadline:
            try:
                blows[str(attack(worker, n))] += 1
            except httpx.TransportError as error:
                blows[type(error).__name__] += 1
            n += N_ATTACKERS

    if chats:
        chatting.start()
    with health_times(worker) as watch.times, ThreadPoolExecutor(N_ATTACKERS) as pool:
        for struck in [pool.submit(strike, first) for first in range(N_ATTACKERS)]:
            struck.result()
    done.set()
    if chats:
        chatting.join()
    return watch, blows


def held(worker: WorkerProcess, name: str, attack: Attack, counts: list[str], chats: bool) -> None:
    engine, process = worker.engine_pid, psutil.Process(worker.pid)
    before = process.memory_info().rss
    watch, blows = attacked(worker, attack, chats)
    growth = process.memory_info().rss - before
    health, control = watch.times["health"], watch.times["control"]
    counts.append(
        f"{name:<28} {dict(blows)}; /health p50 {health[len(health) // 2]:.0f} "
        f"p99 {p99(health):.0f} ms, idle server p99 {p99(control):.0f} ms; "
        f"chats {dict(watch.chats)}; {growth / 2**20:+.0f} MiB"
    )
    assert p99(health) < PATIENCE_MS + p99(control)
    assert not {status for status in blows if status.startswith("5") and status != "503"}, blows
    assert set(watch.chats) <= {"right", "503"} and (watch.chats["right"] or not chats)
    assert growth < GROWTH_BYTES
    assert worker.engine_pid == engine and not worker.logs("engine.crashed")
    worker.wait_idle()
    assert worker.is_ready()


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_of_half_a_minute(worker: WorkerProcess, name: str, counts: list[str]) -> None:
    held(worker, name, ATTACKS[name], counts, chats=True)


def test_thousands_of_embeddings_at_once(
    start_worker: StartWorker, pooling_gguf: Path, counts: list[str]
) -> None:
    worker = start_worker("--model", str(pooling_gguf))
    body = encoded({"input": ["fox"] * 2000, "encoding_format": "float"})
    held(worker, "2,000 embeddings", lambda w, n: post(w, "/v1/embeddings", body), counts, False)
