"""Kills the engine in mid-stream, round by round, and measures the effect on eight streams.

`python -m tools.survival --rounds 200` prints the figures; `test_survival` runs as many. Cells that
are computed in one batch with others may differ in their last bits, so a text may diverge from the
one computed alone only where the two best tokens are that close.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support import sse
from tests.support.worker import WorkerProcess
from tools.bench.stats import percentile

N_STREAMS = 8
N_TOKENS = 240
FIELDS: dict[str, Any] = {"max_tokens": N_TOKENS, "ignore_eos": True, "temperature": 0}
NAMES = ("Otto", "Lily", "Max", "Ruby", "Ella", "Sam", "Zoe", "Tom")
N_FLOWING = 3
"""Tokens of each stream before the engine is killed."""
ROUNDING = 0.02
"""Two log-probabilities that are closer than this may swap places."""
EXACT = ("--kv-type", "f32", "--flash-attention", "off")
"""With these, tokens that are computed in one batch have the same log-probabilities as one by one.
With the defaults they differ by up to 0.16 in batches of more than 60 tokens, with which a stream
continues when its engine is killed late, as on a busy machine."""
DEFAULT_ROUNDING = 0.2
DEVICE_ROUNDING = 0.3
"""The same for a GPU, whose rounding depends on the size of the batch."""
FLAGS = (
    *("--slots", "8", "--crash-limit", "1000", "--threads", "1"),
    *("--speculate", "auto"),
)


@dataclass(slots=True)
class Figures:
    rounds: int = 0
    streams: int = 0
    broken: list[str] = field(default_factory=list)
    """Streams without an `end`, or with a wrong number of tokens."""
    wrong: list[str] = field(default_factory=list)
    """Texts that diverge from the one computed alone without a near tie."""
    equal: int = 0
    """Texts equal to the one computed alone, up to their last token."""
    margins: list[float] = field(default_factory=list)
    """Difference of the two best log-probabilities where the other texts diverge."""
    before: int = 0
    """How many of these diverge before the crash, because they were computed with others."""
    gap_seconds: list[float] = field(default_factory=list)
    """The longest silence of each stream."""
    restart_seconds: list[float] = field(default_factory=list)
    """Time from the kill until the next engine is ready."""


@dataclass(slots=True)
class Alone:
    """A text computed alone in its batch, from its first token on."""

    ids: list[int]
    margins: list[float]
    """Margin of each token's log-probability over the next best token that may be chosen."""

    def parting(self, ids: list[int]) -> int | None:
        """Return the index of the first different id; `None` if there is none."""
        pairs = enumerate(zip(ids, self.ids, strict=True))
        return next((index for index, (own, other) in pairs if own != other), None)

    def is_told_by(self, ids: list[int], rounding: float = ROUNDING) -> bool:
        """Whether the ids are equal, or diverge at a near tie."""
        first = self.parting(ids)
        return first is None or self.margins[first] < rounding


@dataclass(slots=True)
class Read:
    stream: sse.Stream
    gap_seconds: float
    n_before: int
    """Tokens that had arrived when the engine was killed."""


class Survival:
    def __init__(self, worker: WorkerProcess, rounding: float) -> None:
        self._worker, self._rounding = worker, rounding
        self._flowing = threading.Semaphore(0)
        self._killed_at = 0.0
        self.figures = Figures()
        self._alone = {name: alone(worker, prompt(name)) for name in NAMES}

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
        chunks, gap, n_tokens, n_before = [], 0.0, 0, 0
        with self._worker.streaming(prompt(name), **FIELDS) as response:
            last = time.monotonic()
            for n, chunk in enumerate(response.iter_raw()):
                now = time.monotonic()
                if n:
                    gap = max(gap, now - last)
                last = now
                chunks.append(chunk)
                n_more = chunk.count(b"event: token")
                if now < self._killed_at:
                    n_before += n_more
                if n_tokens < N_FLOWING <= n_tokens + n_more:  # a late reader gets several at once
                    self._flowing.release()
                n_tokens += n_more
        return Read(sse.collect(chunks), gap, n_before)

    def _judge(self, name: str, read: Read) -> None:
        figures, stream, whole = self.figures, read.stream, self._alone[name]
        figures.streams += 1
        figures.gap_seconds.append(read.gap_seconds)
        last = stream.events[-1]
        n_ids = len(stream.ids)
        if last["type"] != "end" or not n_ids == last["tokens_out"] == len(whole.ids):
            figures.broken.append(f"{name}: {n_ids} ids, {last}")
            return
        first = whole.parting(stream.ids)
        if first is None:
            figures.equal += 1
            return
        margin = whole.margins[first]
        figures.margins.append(round(margin, 4))
        figures.before += first < read.n_before
        if margin >= self._rounding:
            own, other = (ids[max(first - 3, 0) : first + 6] for ids in (stream.ids, whole.ids))
            figures.wrong.append(
                f"{name}: token {first} differs by {margin:.3g}, {read.n_before} came before the "
                f"crash; {own}, alone {other}"
            )


def alone(worker: WorkerProcess, text: str, n_tokens: int = N_TOKENS, **more: Any) -> Alone:
    fields = FIELDS | {"max_tokens": n_tokens, "deterministic": True} | more
    ids = worker.execute(text, **fields).ids
    answer = worker.post("/v1/completions", {"prompt": text, **fields, "logprobs": 4}).json()
    shown = answer["choices"][0]["logprobs"]
    margins = []
    for chosen, top in zip(shown["token_logprobs"], shown["top_logprobs"], strict=True):
        # Only an end of the text, which may not be chosen, is likelier than the chosen token.
        below = sorted((each for each in top.values() if each <= chosen), reverse=True)
        margins.append(chosen - below[1])
    assert len(margins) == len(ids) == n_tokens
    return Alone(ids, margins)


def prompt(name: str) -> str:
    return f"Once upon a time, there was a gentle fox named {name}. {name} loved to"


def run(
    rounds: int, folder: Path, cache_dir: Path, seconds: float = math.inf, *, exact: bool = True
) -> Figures:
    """Run `rounds` rounds, or as many as begin within the time limit."""
    end = time.monotonic() + seconds
    flags = (*FLAGS, *EXACT) if exact else FLAGS
    worker = WorkerProcess.start(*flags, folder=folder, cache_dir=cache_dir)
    try:
        survival = Survival(worker, ROUNDING if exact else DEFAULT_ROUNDING)
        for _ in range(rounds):
            if time.monotonic() < end:
                survival.round()
        assert worker.stop() == 0, worker.stderr[-2000:]
        return survival.figures
    finally:
        worker.kill()


def shown(figures: Figures) -> str:
    content = asdict(figures)
    for key in ("gap_seconds", "restart_seconds", "margins"):
        values = content[key] or [0.0]
        content[key] = {f"p{p}": round(percentile(values, p), 4) for p in (50, 95, 100)}
    return json.dumps(content, indent=2)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.survival")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="start no round after this many seconds"
    )
    parser.add_argument("--defaults", action="store_true", help="with the default KV settings")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "cache").mkdir()
        folder, cache_dir = Path(name) / "worker", Path(name) / "cache"
        exact = not options.defaults
        figures = run(options.rounds, folder, cache_dir, options.seconds, exact=exact)
    print(shown(figures))
    return 1 if figures.broken or figures.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
