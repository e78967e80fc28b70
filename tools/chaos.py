"""Chaos: clients that reset connections and send nonsense, kills, stops, aborts, a disk that fills
up and a manager that restarts, all at the same time.

`python -m tools.chaos --seconds 600` (`make chaos`) prints the figures; `test_survival` runs a
quarter of a minute of the same. Every request carries a unique mark, so that an answer to another
request is detected.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support import sse
from tests.support.disk import MountRefused, filled, mounted, remount
from tests.support.pool_manager import serving
from tests.support.worker import WorkerProcess, new_job_id
from tools.bench.stats import percentile
from worker.pool.rules import PoolMessage, judge

N_CLIENTS = 16
NAMES = "Otto Lily Max Ruby Ella Noé Sam Zoë".split()
QUESTIONS = (
    *(f"What is the capital of {country}?" for country in ("France", "Brazil", "Italy", "Japan")),
    *(f"Count to {n}." for n in (4, 6, 7, 9)),
    "Show me the emoji for a hedgehog.",
    "Hello, my name is José.",
)
WARM_UP_SECONDS = 5
FLAGS = (
    *("--slots", "8", "--threads", "1", "--stall-timeout", "5"),
    *("--crash-limit", "1000", "--survive-crashes", "1000", "--speculate", "auto"),
)
STORE_MIB = 24
PATIENCE_S = 120.0
"""Time for the last requests to end. Until then clients have no timeout, because the machine may
suspend the run."""
N_MEMORY_SAMPLES = 24
MOST_GROWTH_MIB = 10
BAD_BODIES: tuple[dict[str, Any], ...] = (
    {"max_tokens": "many"},
    {"prompt": None},
    {"prompt": ["Once"]},
    {"temperature": 7},
    {"stop": [""] * 5},
    {"seed": -1},
    {"nowhere": 1},
    {"grammar": "root ::= nowhere"},
    {"json_schema": {"type": "nothing"}},
    {"prompt": "a " * 5000},
)
"""Fields that override those of a good body, each of which makes it invalid."""


@dataclass(slots=True)
class Figures:
    """The findings of a run; `lost`, `wrong` and `twice` must be empty."""

    seconds: float = 0
    requests: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    """Requests without exactly one terminal event or refusal with a code."""
    wrong: list[str] = field(default_factory=list)
    """Answers to another request, and bad bodies that were not refused as such."""
    twice: list[str] = field(default_factory=list)
    """Answers whose number of tokens differs from the engine's count."""
    survivors: int = 0
    """Streams that another engine continued and that ended well."""
    attacks: Counter[str] = field(default_factory=Counter)
    recovery_seconds: dict[str, list[float]] = field(default_factory=dict)
    """Recovery times by attack; after a SIGSTOP they include the stall timeout."""
    disk_troubles: Counter[str] = field(default_factory=Counter)
    """Empty if the disk cannot be mounted."""
    manager_restarts: int = 0
    heartbeat_breaches: list[str] = field(default_factory=list)
    fds: tuple[int, int] = (0, 0)
    rss_mib: tuple[float, float] = (0, 0)
    memory_mib: list[float] = field(default_factory=list)
    """Resident memory of the API process, at equal intervals."""
    engines: int = 0
    ready_at_the_end: bool = False
    accepted_by_worker: float = 0
    ended_by_worker: float = 0

    @property
    def growth_mib(self) -> float:
        """Growth of the API process from the second quarter of the run to the last."""
        quarter = len(self.memory_mib) // 4
        second, last = self.memory_mib[quarter : 2 * quarter], self.memory_mib[-quarter:]
        return max(last) - max(second) if quarter else 0.0

    @property
    def n_recoveries(self) -> int:
        return sum(map(len, self.recovery_seconds.values()))

    def summary(self) -> dict[str, Any]:
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        found["recovery_seconds"] = {
            name: {"n": len(times)} | {f"p{p}": round(percentile(times, p), 2) for p in (50, 95)}
            for name, times in self.recovery_seconds.items()
        }
        return found


def chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


class Chaos:
    def __init__(self, worker: WorkerProcess, seed: int) -> None:
        self.worker = worker
        self.figures = Figures()
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._seed = seed
        self._answers = {
            question: worker.execute(chat(question), temperature=0).text for question in QUESTIONS
        }

    # --- clients ---

    def client(self, number: int) -> None:
        dice = random.Random(self._seed * 1000 + number)
        with self.worker.client(timeout=None) as http:
            while not self.stop.is_set():
                request = dice.choices(
                    [self._one_request, self._one_bad_body, self._one_reset], [8, 1, 1]
                )[0]
                outcome = request(http, dice)
                with self._lock:
                    self.figures.requests += 1
                    self.figures.outcomes[outcome] += 1
                if outcome.startswith("refused"):
                    self.stop.wait(dice.uniform(0.05, 0.3))

    def _one_bad_body(self, http: httpx.Client, dice: random.Random) -> str:
        good = {"job_id": new_job_id(), "prompt": "Once", "max_tokens": 1}
        body = json.dumps(good | dice.choice(BAD_BODIES)).encode()
        if dice.random() < 0.5:
            body = json.dumps(good).encode()[: dice.randrange(20)] + dice.randbytes(20)
        answer = http.post("/execute", content=body, headers={"Content-Type": "application/json"})
        code = answer.json().get("code", "INVALID_REQUEST")
        if answer.status_code not in (400, 503):
            self._note(self.figures.wrong, f"{answer.status_code} for {body[:100]!r}")
        return "bad body" if answer.status_code == 400 else f"refused {code}"

    def _one_reset(self, http: httpx.Client, dice: random.Random) -> str:
        """Reset a connection during its request or its answer."""
        body = {"job_id": new_job_id(), "prompt": "Once upon a time", "max_tokens": 200}
        content = json.dumps(body | {"ignore_eos": True}).encode()
        head = f"POST /execute HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        head += "Content-Type: application/json\r\n"
        # Otherwise a short answer, such as a refusal, would take until the idle connection is
        # closed.
        whole = f"{head}Connection: close\r\n\r\n".encode() + content
        with socket.create_connection(("127.0.0.1", self.worker.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if dice.random() < 0.3:
                client.sendall(whole[: dice.randrange(len(whole))])
                return "request reset by us"
            client.sendall(whole)
            for _ in range(dice.randrange(5)):
                client.recv(1000)
        return "answer reset by us"

    def _one_request(self, http: httpx.Client, dice: random.Random) -> str:
        job_id = new_job_id()
        question = dice.choice(QUESTIONS) if dice.random() < 0.5 else None
        name = dice.choice(NAMES)
        # The stop string never comes; it makes the request unique, so that a crash during this
        # request does not put the next one into quarantine.
        body: dict[str, Any] = {"job_id": job_id, "stop": [f"#{job_id}#"]}
        if question is not None:
            body |= {"prompt": chat(question), "temperature": 0}
        else:
            story = f"Once upon a time, there was a gentle fox named {name}. {name} loved to"
            # Cool enough that the hero's name appears: at 1.0 one story in a thousand loses it.
            body |= {"prompt": story, "max_tokens": dice.randint(20, 300), "ignore_eos": True}
            body |= {"temperature": 0.4}
        give_up_after = dice.randint(1, 30) if dice.random() < 0.2 else None
        try:
            with http.stream("POST", "/execute", json=body) as response:
                if response.status_code != 200:
                    return f"refused {json.loads(response.read())['code']}"
                chunks = response.iter_raw()
                if give_up_after is not None:
                    for _ in zip(range(give_up_after), chunks, strict=False):
                        pass
                    return "aborted by us"
                stream = sse.collect(chunks)
        except (httpx.HTTPError, AssertionError, ValueError, KeyError) as trouble:
            self._note(self.figures.lost, f"{job_id}: {type(trouble).__name__}: {trouble}")
            return "lost"
        return self._judged(stream, question, name, job_id)

    def _judged(self, stream: sse.Stream, question: str | None, name: str, job_id: str) -> str:
        ended = stream.events[-1]["type"] == "end"
        if question is not None:
            expected = self._answers[question]
            right = stream.text == expected if ended else expected.startswith(stream.text)
            if not right:
                self._note(self.figures.wrong, f"{job_id}: {question} {stream.text!r}")
        elif ended and len(stream.ids) > 60 and name not in stream.text:
            self._note(self.figures.wrong, f"{job_id}: no {name} in {stream.text!r}")
        if not ended:
            return f"error {stream.error['code']}"
        n_ids, n_out = len(stream.ids), stream.end["tokens_out"]
        # The last tokens of a story may be control tokens: they have no text and thus no event.
        if not n_out - 2 <= n_ids <= n_out:
            self._note(self.figures.twice, f"{job_id}: {n_ids} ids of {n_out} tokens")
        with self._lock:
            self.figures.survivors += "engine_restarts" in stream.end
        return "end"

    def _note(self, where: list[str], what: str) -> None:
        with self._lock:
            where.append(what[:300])

    # --- attacks ---

    def attacker(self) -> None:
        dice = random.Random(self._seed)
        while not self.stop.wait(dice.uniform(1, 5)):
            engines = self.worker.engines()
            if not engines or not self.worker.is_ready():
                continue
            name = dice.choice(["SIGKILL", "SIGABRT", "SIGSTOP"])
            before = time.monotonic()
            try:
                os.kill(engines[0].pid, signal.Signals[name])
            except ProcessLookupError:
                continue
            with self._lock:
                self.figures.attacks[name] += 1
            self._measure_recovery(name, engines[0], before)

    def _measure_recovery(self, name: str, engine: psutil.Process, before: float) -> None:
        """Wait until another engine serves, and record the time."""
        while time.monotonic() - before < 60:
            pids = {child.pid for child in self.worker.engines()}
            if pids and engine.pid not in pids and self.worker.is_ready():
                with self._lock:
                    times = self.figures.recovery_seconds.setdefault(name, [])
                    times.append(time.monotonic() - before)
                return
            time.sleep(0.05)

    def disk(self, store: Path) -> None:
        """The store's disk is full, then read-only, then normal."""
        dice = random.Random(self._seed)
        while not self.stop.wait(dice.uniform(1, 5)):
            with filled(store):
                self.figures.disk_troubles["full"] += 1
                self.stop.wait(dice.uniform(1, 5))
            try:
                remount(store, "ro")
            except subprocess.CalledProcessError:  # the engine is writing
                continue
            self.figures.disk_troubles["read-only"] += 1
            self.stop.wait(dice.uniform(1, 5))
            remount(store, "rw")

    def watch_memory(self, seconds: float) -> None:
        while not self.stop.wait(seconds / N_MEMORY_SAMPLES):
            self.figures.memory_mib.append(sizes(self.worker)[1])


def run(seconds: float, folder: Path, cache_dir: Path, seed: int, n_attacks: int = 0) -> Figures:
    """Run against a worker of its own until the attacks are made; returns the figures."""
    messages: list[PoolMessage] = []
    store: Path | None = folder.with_name("store")
    with ExitStack() as stack:
        try:
            stack.enter_context(mounted(folder.with_name("store"), f"size={STORE_MIB}m"))
        except MountRefused:
            store = None
        with serving() as manager:
            port = int(manager.server_address[1])
            flags = (*FLAGS, *manager.flags(), "--kv-store", str(store or folder / "store"))
            worker = WorkerProcess.start(*flags, folder=folder, cache_dir=cache_dir)
            stack.callback(worker.kill)
            manager.wait_for(n_callbacks=1)
            messages += manager.messages()
        return _run(Chaos(worker, seed), seconds, n_attacks, port, messages, store)


def _run(
    chaos: Chaos,
    seconds: float,
    n_attacks: int,
    port: int,
    messages: list[PoolMessage],
    store: Path | None,
) -> Figures:
    figures, worker = chaos.figures, chaos.worker
    threads = [
        threading.Thread(target=chaos.client, args=(n,), daemon=True) for n in range(N_CLIENTS)
    ]
    for thread in threads:
        thread.start()
    time.sleep(WARM_UP_SECONDS)
    before = sizes(worker)
    attackers = [threading.Thread(target=chaos.attacker)]
    attackers.append(threading.Thread(target=chaos.watch_memory, args=(seconds,)))
    if store is not None:
        attackers.append(threading.Thread(target=chaos.disk, args=(store,)))
    for attacker in attackers:
        attacker.start()
    began = time.monotonic()
    dice = random.Random(port)
    while (left := seconds - (time.monotonic() - began)) > 0 or (
        sum(figures.attacks.values()) < n_attacks
    ):
        with serving(port) as manager:
            time.sleep(min(max(left, 1), dice.uniform(2, 8)))
        messages += manager.messages()
        figures.manager_restarts += 1
        time.sleep(dice.uniform(0.2, 2))
    chaos.stop.set()
    for thread in [*attackers, *threads]:
        thread.join(PATIENCE_S)
    figures.lost += [f"{thread.name} waits for ever" for thread in threads if thread.is_alive()]
    figures.seconds = round(time.monotonic() - began, 1)
    worker.wait_ready()
    worker.wait_idle()
    figures.ready_at_the_end = worker.is_ready()
    after = sizes(worker)
    figures.fds, figures.rss_mib = (before[0], after[0]), (before[1], after[1])
    figures.engines = len(worker.engines())
    figures.ended_by_worker = sum(
        worker.metric(f'worker_requests_total{{outcome="{outcome}"}}')
        for outcome in ("success", "error", "cancelled", "timeout")
    )
    figures.accepted_by_worker = len(worker.logs("request.accepted"))
    # Gaps between heartbeats are caused by the restarts; everything else counts.
    figures.heartbeat_breaches = [
        f"{breach.rule}: {breach.detail}" for breach in judge(messages) if breach.rule != "interval"
    ]
    assert worker.stop() == 0, worker.stderr[-2000:]
    return figures


def sizes(worker: WorkerProcess) -> tuple[int, float]:
    """Return the number of open files and the resident MiB of the API process."""
    process = psutil.Process(worker.pid)
    return process.num_fds(), round(process.memory_info().rss / 2**20, 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.chaos")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    print(f"chaos for {options.seconds:g} s, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cache").mkdir()
        figures = run(options.seconds, folder / "worker", folder / "cache", options.seed)
    print(json.dumps(figures.summary(), indent=2, ensure_ascii=False))
    bad = figures.lost or figures.wrong or figures.twice or not figures.ready_at_the_end
    return 1 if bad or figures.growth_mib > MOST_GROWTH_MIB else 0


if __name__ == "__main__":
    sys.exit(main())
