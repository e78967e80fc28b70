"""Kills the engine in mid-stream, round by round, and measures what eight streams notice of it.

`python -m tests.e2e.survival --rounds 200` prints the figures; `test_survival` runs two rounds. A
text may differ from the undisturbed one behind the crash, because cells that are computed in one
batch and one by one differ in their last bits; how many do so is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.support import sse
from tests.support.worker import WorkerProcess

N_STREAMS = 8
FIELDS = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
NAMES = ("Otto", "Lily", "Max", "Ruby", "Ella", "Sam", "Zoe", "Tom")
FLAGS = ("--slots", "8", "--crash-limit", "1000", "--threads", "1")


@dataclass(slots=True)
class Figures:
    rounds: int = 0
    streams: int = 0
    broken: list[str] = field(default_factory=list)
    """Streams without an `end`, or with another number of tokens than was asked for."""
    unequal_before: list[str] = field(default_factory=list)
    """Texts that differ from the undisturbed one in what was sent before the crash."""
    equal: int = 0
    """Texts equal to the undisturbed one to their last token."""
    gap_seconds: list[float] = field(default_factory=list)
    """The longest silence of each stream."""
    restart_seconds: list[float] = field(default_factory=list)
    """From the kill to the next engine's readiness."""


@dataclass(slots=True)
class Read:
    stream: sse.Stream
    gap_seconds: float
    n_before: int
    """Tokens that had come when the engine was killed."""


class Survival:
    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self._flowing = threading.Semaphore(0)
        self._killed_at = 0.0
        self.figures = Figures()
        self._whole = {name: worker.execute(prompt(name), **FIELDS).ids for name in NAMES}

    def round(self) -> None:
        n_engines = len(self._worker.logs("engine.ready"))
        self._killed_at = float("inf")
        with ThreadPoolExecutor(N_STREAMS) as pool:
            reads = [pool.submit(self._read, name) for name in NAMES]
            for _ in NAMES:
                assert self._flowing.acquire(timeout=60)
            self._killed_at = time.monotonic()
            os.kill(self._worker.engine_pid, signal.SIGKILL)
            while len(self._worker.logs("engine.ready")) == n_engines:
                time.sleep(0.02)
            self.figures.restart_seconds.append(time.monotonic() - self._killed_at)
            for name, read in zip(NAMES, reads, strict=True):
                self._judge(name, read.result(120))
        self.figures.rounds += 1

    def _read(self, name: str) -> Read:
        chunks, gap, n_before = [], 0.0, 0
        with self._worker.streaming(prompt(name), **FIELDS) as response:
            last = time.monotonic()
            for n, chunk in enumerate(response.iter_raw()):
                now = time.monotonic()
                if n:
                    gap = max(gap, now - last)
                last = now
                chunks.append(chunk)
                if now < self._killed_at:
                    n_before += chunk.count(b"event: token")
                if n == 3:
                    self._flowing.release()
        return Read(sse.collect(chunks), gap, n_before)

    def _judge(self, name: str, read: Read) -> None:
        figures, stream, whole = self.figures, read.stream, self._whole[name]
        figures.streams += 1
        figures.gap_seconds.append(read.gap_seconds)
        last = stream.events[-1]
        n_ids = len(stream.ids)
        if last["type"] != "end" or not n_ids == last["tokens_out"] == len(whole):
            figures.broken.append(f"{name}: {n_ids} ids, {last}")
        if stream.ids[: read.n_before] != whole[: read.n_before]:
            figures.unequal_before.append(name)
        figures.equal += stream.ids == whole


def prompt(name: str) -> str:
    return f"Once upon a time, there was a gentle fox named {name}. {name} loved to"


def run(rounds: int, folder: Path, cache_dir: Path) -> Figures:
    worker = WorkerProcess.start(*FLAGS, folder=folder, cache_dir=cache_dir)
    try:
        survival = Survival(worker)
        for _ in range(rounds):
            survival.round()
        assert worker.stop() == 0, worker.stderr[-2000:]
        return survival.figures
    finally:
        worker.kill()


def percentile(values: list[float], share: float) -> float:
    return round(sorted(values)[min(int(share * len(values)), len(values) - 1)], 2)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.survival")
    parser.add_argument("--rounds", type=int, default=200)
    rounds: int = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "cache").mkdir()
        figures = run(rounds, Path(name) / "worker", Path(name) / "cache")
    shown = asdict(figures)
    for key in ("gap_seconds", "restart_seconds"):
        shown[key] = {f"p{p}": percentile(shown[key], p / 100) for p in (50, 95)}
    print(json.dumps(shown, indent=2))
    return 1 if figures.broken or figures.unequal_before else 0


if __name__ == "__main__":
    sys.exit(main())
