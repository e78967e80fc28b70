"""No request blocks the API process's event loop for long."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pydantic_core
import pytest

from tests.conftest import StartWorker
from tests.process.api.hostile_bodies import (
    CHAT,
    HOSTILE_BODIES,
    chat,
    encoded,
    filled,
    hostile_bodies,
)
from tests.support.clock import HoldClock
from tests.support.worker import WorkerProcess

LONGEST_MS = 20.0
"""Limit on an idle machine. On a busy one it is twice the time that the parser itself takes for a
text of escapes, which is the longest native call."""
N_TRIES = 5
"""Number of tries: a hold by the request recurs in each, one by the machine does not."""
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
WATCHED = [sys.executable, "-m", "tests.process.api.watched_command"]


class Watched(NamedTuple):
    worker: WorkerProcess
    holds: Path

    def longest_ms(self, sent: bytes) -> tuple[int, float]:
        """Return the status of the request, and the longest hold until then, in ms."""
        with self.holds.open() as holds:
            holds.seek(0, 2)
            status = self._status(sent)
            for _ in range(2):  # a finished hold is recorded before the second request is read
                self._status(HEALTH)
            return status, max(map(float, holds.read().split()), default=0.0)

    def _status(self, sent: bytes) -> int:
        with socket.create_connection(("127.0.0.1", self.worker.port), timeout=120) as client:
            try:
                client.sendall(sent)
            except OSError:
                pass  # refused before it was read completely; the answer is already there
            answer = b""
            while part := client.recv(2**20):
                answer += part
        return int(answer.split(b" ", 2)[1])


@pytest.fixture(scope="module")
def watched(share_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    holds = tmp_path_factory.mktemp("watched") / "holds"
    holds.touch()
    return Watched(share_worker(command=WATCHED, env={"LOOP_HOLDS": str(holds)}), holds)


def request(path: str, body: bytes, *, chunk_bytes: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += "Content-Type: application/json\r\n"
    if chunk_bytes is None:
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    chunks = (body[at : at + chunk_bytes] for at in range(0, len(body), chunk_bytes))
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + framed + b"0\r\n\r\n"


def allowed_ms() -> float:
    text = filled('{"a":"', '\\"', '"}')
    began = time.thread_time()
    pydantic_core.from_json(text)
    return max(LONGEST_MS, 2000 * (time.thread_time() - began))


ANSWERS = frozenset({200, 400, 403, 404, 413, 415, 431, 503})


def excess_ms(watched: Watched, sent: bytes, answers: frozenset[int] = ANSWERS) -> float:
    """Return by how much the longest hold exceeds the limit, in the best try."""
    longest: list[float] = []
    while not longest or (min(longest) >= 0 and len(longest) < N_TRIES):
        status, held_ms = watched.longest_ms(sent)
        assert status in answers, (status, sent[:200])
        longest.append(held_ms - (LONGEST_MS if held_ms < LONGEST_MS else allowed_ms()))
    return min(longest)


@pytest.mark.parametrize("group", HOSTILE_BODIES)
def test_no_hostile_body_holds_the_event_loop(watched: Watched, group: str) -> None:
    excess = {
        name: excess_ms(watched, request(path, body)) for name, path, body in hostile_bodies(group)
    }
    print(*sorted(excess.items(), key=lambda item: -item[1])[:5], sep="\n")
    assert not {name: too_long for name, too_long in excess.items() if too_long >= 0}


PROMPTS = {"prompt": ["a b c d " * 60] * 16, "max_tokens": 0, "echo": True, "logprobs": 20}
LONG_PROMPT = {"prompt": "a b c d " * 120, "max_tokens": 1, "stream": True}
ODDS = {"prompt": "One", "n_predict": 100, "n_probs": 1000, "ignore_eos": True}
SCORED = {
    "the odds of many": ("/completion", ODDS),
    "the odds of many, streamed": ("/completion", ODDS | {"stream": True}),
    "prompts": ("/v1/completions", PROMPTS),
    "streamed prompts": ("/v1/completions", PROMPTS | {"stream": True}),
    "a streamed prompt": ("/v1/completions", LONG_PROMPT | {"echo": True, "logprobs": 20}),
    "a streamed prompt in vLLM's form": ("/v1/completions", LONG_PROMPT | {"prompt_logprobs": 20}),
    "answers": (
        CHAT,
        {**chat(n=16, logprobs=True, top_logprobs=20, ignore_eos=True), "max_tokens": 80},
    ),
}


@pytest.mark.parametrize("name", SCORED)
def test_no_answer_of_many_log_probabilities_holds_the_event_loop(
    watched: Watched, name: str
) -> None:
    path, body = SCORED[name]
    assert excess_ms(watched, request(path, encoded(body)), frozenset({200})) < 0


TINY_CHUNKS = b'{"prompt":"' + b"a" * 200_000 + b'","max_tokens":1}'


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not report it")
def test_a_wait_for_a_processor_does_not_count_as_a_hold() -> None:
    """On a busy machine, the loop may wait for a processor that another thread of its process
    uses."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            wall, own, held = time.monotonic(), time.thread_time(), HoldClock()
            while time.thread_time() < own + 0.2:
                pass
            held_s, wall_s = held.lap(), time.monotonic() - wall
            other.kill()
    finally:
        os.sched_setaffinity(0, before)
    assert 0.19 < held_s < 0.8 * wall_s


READS = {
    "chunks of a byte": request("/v1/inference", TINY_CHUNKS, chunk_bytes=1),
    "chunks of 7 bytes": request("/v1/inference", TINY_CHUNKS, chunk_bytes=7),
    "requests in a row": b"GET /none HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8000 + HEALTH,
    "wrong requests in a row": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n\r\n" * 6000
    + HEALTH,
    "short headers": HEALTH[:-2] + b"a:b\r\n" * 12_000 + b"\r\n",
}


@pytest.mark.parametrize("name", READS)
def test_many_small_parts_in_one_read_do_not_hold_the_event_loop(
    watched: Watched, name: str
) -> None:
    assert excess_ms(watched, READS[name]) < 0
