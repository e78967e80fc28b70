"""10,000 random connections beside sixteen streams.

`python -m tests.system.security.test_connections PORT SEED` is the attack, a separate process with
a higher nice value than all others, because its own CPU time is not measured. It opens connections
on command, so that windows with and without them alternate and other work on the machine affects
both.

On two cores, both used by the engine, 150 connections a second cost the API process 5 % of a core
and the streams 9.5 % of their speed, including the attack's own work on the same cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import psutil
import pytest

from tests import ROOT
from tests.conftest import StartWorker
from tests.process.api.test_crowd import health_times, p99
from tests.support.worker import WorkerProcess, computed_s, new_job_id

pytestmark = pytest.mark.long

N_STREAMS = 16
N_CONNECTIONS = 10_000
PER_SECOND = 150
ROUNDS = 10
SETTLING_SECONDS = 4.0
"""Seconds after which most of a window's connections have ended, and the others only stay open."""
N_WARM = 1_000
"""Connections before the measurement, because allocators keep memory."""
HEALTH_MS = 20.0
GROWTH_BYTES = 50 * 2**20
SLOWER = 0.10

Dice = random.Random


# --- the attack --------------------------------------------------------------------------


def request(dice: Dice) -> bytes:
    """Return a whole HTTP/1.1 request, unusual but mostly valid."""
    method = dice.choice(("GET", "GET", "HEAD", "OPTIONS", "POST", "POST", "POST", "DELETE", "X"))
    path = dice.choice(
        ("/health", "/info", "/metrics", "/v1/models", "/", "/nowhere", "/tokenize", "/cancel")
        + ("/openapi.json", "/execute", "/v1/chat/completions", "/" + "a" * dice.randrange(9000))
    )
    lines = [f"{method} {path} HTTP/1.{dice.choice('1110')}", "Host: localhost"]
    lines += dice.choices(
        ["Expect: 100-continue", "Connection: close", "Connection: Upgrade\r\nUpgrade: h2c"]
        + ["Upgrade: websocket\r\nConnection: Upgrade", "Connection: keep-alive", "X: \xff"]
        + ["Origin: http://evil.example", "Range: bytes=0-", "Host: twice", "TE: trailers"],
        k=dice.randrange(3),
    )
    body = b""
    if method == "POST":
        lines.append("Content-Type: application/json")
        body = b'{"content": "%s"}' % (b"a " * int(2 ** dice.uniform(0, 13)))
        if dice.random() < 0.5:
            lines.append("Transfer-Encoding: chunked")
            body = chunked(dice, body)
        else:
            lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def chunked(dice: Dice, body: bytes) -> bytes:
    """Encode a body in chunks, with extensions and occasionally a trailer."""
    step = dice.choice((1, 7, 100, 5000)) if len(body) < 2000 else 5000
    parts = [body[at : at + step] for at in range(0, len(body), step)]
    framed = [b"%x;%s\r\n%s\r\n" % (len(p), b"e=" + b"1" * dice.randrange(9), p) for p in parts]
    return b"".join(framed) + dice.choice((b"0\r\n\r\n", b"0;last\r\nTrailer: a\r\n\r\n"))


def broken(dice: Dice, sent: bytes) -> bytes:
    at = dice.randrange(len(sent))
    return sent[:at] + dice.choice((b"", b"\0", dice.randbytes(5), b"\r\n\r\n")) + sent[at + 1 :]


async def connection(port: int, dice: Dice, outcomes: Counter[str]) -> None:
    """One client: what it sends, in which pieces and at which pace, and how it disconnects."""
    sent = b"".join(request(dice) for _ in range(dice.choice((1, 1, 1, 2, 8))))  # pipelined
    if dice.random() < 0.25:
        sent = broken(dice, sent)
    if dice.random() < 0.25:
        sent = sent[: dice.randrange(len(sent) + 1)]
    cuts = sorted(dice.randrange(len(sent) + 1) for _ in range(dice.choice((0, 0, 1, 5))))
    pause = dice.choice((0, 0, 0.05, 3))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
            writer.write(sent[start:end])
            await asyncio.sleep(pause)
        leaving = dice.choice(("reads", "reads", "half-closed", "leaves", "resets", "stays"))
        if leaving == "half-closed":
            writer.write_eof()
        if leaving in ("reads", "half-closed", "stays"):
            with suppress(TimeoutError):
                async with asyncio.timeout(30 if leaving == "stays" else 2):
                    while answer := await reader.read(65536):
                        outcomes[
                            answer[9:12].decode("latin-1") if answer[:5] == b"HTTP/" else ""
                        ] += 1
        if leaving == "resets":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    finally:
        writer.close()


async def attack(port: int, seed: int) -> Counter[str]:
    """Open as many connections as each line of stdin says; answers the line when all are open."""
    outcomes: Counter[str] = Counter()
    dice = Dice(seed)

    async def one(own: Dice) -> None:
        try:
            await connection(port, own, outcomes)
        except OSError as error:
            outcomes[type(error).__name__] += 1

    async with asyncio.TaskGroup() as group:
        while count := await asyncio.to_thread(sys.stdin.readline):
            for _ in range(int(count)):
                group.create_task(one(Dice(dice.random())))
                await asyncio.sleep(dice.expovariate(PER_SECOND))
            print(flush=True)
    return outcomes


@contextmanager
def attacker(worker: WorkerProcess, seed: int) -> Iterator[Callable[[int], str]]:
    """Yield a function that opens connections; 0 ends the attack and returns the outcomes."""
    module = [sys.executable, "-m", __name__, str(worker.port), str(seed)]
    pipe = subprocess.PIPE
    with subprocess.Popen(module, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def opens(count: int) -> str:
            if count:
                print(count, file=stdin, flush=True)
            else:
                stdin.close()
            return stdout.readline()

        yield opens


# --- the concurrent streams ---------------------------------------------------------------


class Streams:
    """Sixteen clients, each of which starts a new story when the last has ended."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.tokens = [0] * N_STREAMS
        self.failures: list[str] = []
        self._worker, self._stop = worker, threading.Event()
        self._threads = [threading.Thread(target=self._read, args=(n,)) for n in range(N_STREAMS)]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _read(self, number: int) -> None:
        with self._worker.client(timeout=None) as client:
            while not self._stop.is_set():
                body = {"job_id": new_job_id(), "prompt": "Once upon a time", "ignore_eos": True}
                with client.stream("POST", "/execute", json=body) as answer:
                    last = b""
                    for chunk in answer.iter_raw():
                        self.tokens[number] += chunk.count(b"event: token")
                        last = (last + chunk)[-400:]
                        if self._stop.is_set():
                            return
                    if b"event: end" not in last:
                        self.failures.append(last.decode())


@dataclass
class Window:
    """Measurements with or without an attack, over all rounds."""

    seconds: float = 0.0
    computed: float = 0.0
    """CPU seconds of the API process."""
    tokens: list[int] = field(default_factory=lambda: [0] * N_STREAMS)
    times: dict[str, list[float]] = field(default_factory=lambda: {"health": [], "control": []})

    def look(
        self, worker: WorkerProcess, streams: Streams, meanwhile: Callable[[], object]
    ) -> None:
        with health_times(worker) as times:
            api, tokens = [psutil.Process(worker.pid)], list(streams.tokens)
            began, computed = time.monotonic(), computed_s(api)
            meanwhile()
            self.seconds += time.monotonic() - began
            self.computed += computed_s(api) - computed
            new = zip(self.tokens, streams.tokens, tokens, strict=True)
            self.tokens = [sum + now - before for sum, now, before in new]
        for name, found in times.items():
            self.times[name] += found

    @property
    def paces(self) -> list[float]:
        return [n / self.seconds for n in self.tokens]

    def __str__(self) -> str:
        health, idle = (p99(sorted(self.times[name])) for name in ("health", "control"))
        return (
            f"{sum(self.paces):.0f} tokens/s, the API process {self.computed / self.seconds:.0%} "
            f"of a core, /health p99 {health:.1f} ms (an idle server {idle:.1f})"
        )


def test_ten_thousand_random_connections(start_worker: StartWorker, counts: list[str]) -> None:
    worker = start_worker("--slots", "16")
    process, seed = psutil.Process(worker.pid), random.randrange(10**6)
    alone, beside = Window(), Window()
    n_at_once = N_CONNECTIONS // ROUNDS
    with Streams(worker) as streams, attacker(worker, seed) as opens:
        opens(N_WARM)
        time.sleep(SETTLING_SECONDS)
        before = process.memory_info().rss
        for _ in range(ROUNDS):
            beside.look(worker, streams, lambda: opens(n_at_once))
            time.sleep(SETTLING_SECONDS)
            alone.look(worker, streams, lambda: time.sleep(n_at_once / PER_SECOND))
        growth = process.memory_info().rss - before
        outcomes = opens(0)
    slower = [1 - there / here for there, here in zip(beside.paces, alone.paces, strict=True)]
    counts.append(
        f"seed {seed}, {PER_SECOND} connections a second: {outcomes.strip()}; without: {alone}; "
        f"with: {beside}; slower {1 - sum(beside.paces) / sum(alone.paces):.1%}, the slowest "
        f"stream {max(slower):.1%}; {growth / 2**20:+.1f} MiB"
    )
    print(counts[-1])
    assert streams.failures == []
    assert p99(sorted(beside.times["health"])) <= HEALTH_MS + p99(sorted(beside.times["control"]))
    assert growth <= GROWTH_BYTES
    assert max(slower) <= SLOWER
    assert worker.get("/health").status_code == 200 and not worker.logs("request.broken")


if __name__ == "__main__":
    os.nice(19)
    answers = asyncio.run(attack(*map(int, sys.argv[1:])))
    print(json.dumps(dict(answers.most_common())))
