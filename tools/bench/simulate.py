"""Open arrivals on a clock of processor time: `python -m tools.bench.simulate [--rate 0.3] …`.

Runs the engine's loop with llama.cpp on one thread. The clock counts that thread's time and skips
idle time, so other programs on the machine have little effect, and settings can be compared when a
wall clock would be too noisy. There is no HTTP, no client and no second thread: the figures do not
include the cost of the API process.

`--like-llama-server` schedules as llama-server does by default: four slots in one pool, and each
prompt computed as a whole.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from builds import pins
from tools.bench.model import INSTRUCT, bench_model
from tools.bench.peer_build import build_peers
from tools.bench.stats import percentile
from worker.devices.plan.cells import divided
from worker.engine.limits import Limits
from worker.engine.loop import Loop
from worker.engine.model_runner import ModelRunner
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.llama.constraint import GrammarVocabulary
from worker.llama.context import Context, ContextOptions
from worker.llama.model import Model
from worker.llama.sampler import Sampler
from worker.wire.messages import Event, Token
from worker.wire.sampling import Sampling
from worker.wire.work import InferenceRequest

N_IN, N_OUT = (27, 1080), (16, 200)
"""Tokens of a prompt and of an answer: 20 to 800 words, as in the load `arrivals`."""
_MEMORY_BYTES, _COPY_RATE = 4 << 30, 4e9
_WHOLE = 3600.0


class Clock:
    """Seconds of this thread's CPU time, plus the skipped ones."""

    def __init__(self) -> None:
        self._jumped = 0.0

    def __call__(self) -> float:
        return time.thread_time() + self._jumped

    def jump_to(self, at: float) -> None:
        self._jumped += max(at - self(), 0.0)


def layouts_of(options: argparse.Namespace) -> tuple[Limits, ...]:
    """Return the layouts that `limits_of` makes for a worker with these settings."""
    pool = Limits(
        n_slots=options.slots,
        n_cells=options.cells,
        batch=2048,
        prefill_budget=options.budget,
        inter_token_seconds=options.target,
        unified=True,
        memory_bytes=_MEMORY_BYTES,
        cell_bytes=options.cell_bytes,
    )
    if options.like_llama_server:
        return (replace(pool, n_slots=4, prefill_budget=2048, inter_token_seconds=_WHOLE),)
    parts = [
        replace(
            pool,
            n_slots=n,
            n_cells=divided(options.cells, n).cells,
            unified=False,
            copy_seconds=options.cell_bytes * options.cells / n / _COPY_RATE,
        )
        for n in (options.slots, options.slots // 2)
        if n > 1
    ]
    return (*parts, pool)


def simulated(options: argparse.Namespace, path: Path) -> dict[str, float]:
    model = Model(str(path))
    context = Context(
        model, ContextOptions(options.cells, n_seq_max=options.slots, threads=1, kv_unified=True)
    )
    runner = ModelRunner(model, context, options.cells)
    layouts = layouts_of(options)
    if len(layouts) > 1:
        context.divide(layouts[0].n_cells, layouts[0].n_slots, unified=False)
    scheduler, clock = Scheduler(*layouts), Clock()
    times: defaultdict[int, list[float]] = defaultdict(list)
    counts: defaultdict[int, int] = defaultdict(int)

    def take(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Token):
                times[event.request_id].append(clock())
                counts[event.request_id] += len(event.token_ids)

    loop, vocabulary = Loop(runner, scheduler, take, clock), GrammarVocabulary(model)
    choose, began = random.Random(options.seed), clock()
    due: list[float] = []
    at = began
    for _ in range(options.count):
        due.append(at)
        at += choose.expovariate(options.rate)
    submitted = 0
    while submitted < len(due) or scheduler.has_work:
        if not scheduler.has_work:
            clock.jump_to(due[submitted])
        while submitted < len(due) and due[submitted] <= clock():
            prompt = [choose.randrange(model.n_vocab) for _ in range(choose.randint(*N_IN))]
            wish = Sampling(seed=1, temperature=0.0, ignore_eos=True)
            request = InferenceRequest(
                str(submitted), tuple(prompt), wish, max_tokens=choose.randint(*N_OUT)
            )
            sampler = Sampler(model, wish, prompt, vocabulary)
            loop.submit(Sequence(submitted, request, prompt, sampler))
            submitted += 1
        loop.turn()
    wall = clock() - began
    gaps = [b - a for each in times.values() for a, b in zip(each, each[1:], strict=False)]
    firsts = [times[index][0] - at for index, at in enumerate(due)]
    ends = [times[index][-1] - at for index, at in enumerate(due)]
    return {
        "tok/s": sum(counts.values()) / wall,
        "TTFT p50, s": percentile(firsts, 50),
        "TTFT p95, s": percentile(firsts, 95),
        "end to end p50, s": percentile(ends, 50),
        "end to end p95, s": percentile(ends, 95),
        "inter-token p50, ms": percentile(gaps, 50) * 1e3,
        "inter-token p95, ms": percentile(gaps, 95) * 1e3,
        "inter-token p99, ms": percentile(gaps, 99) * 1e3,
        "longest gap, ms": max(gaps) * 1e3,
    }


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.simulate", description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file; default: the benchmark's SmolLM2")
    parser.add_argument("--rate", type=float, default=0.3, help="requests a second")
    parser.add_argument("--count", type=int, default=20, help="requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--cells", type=int, default=8192)
    parser.add_argument("--cell-bytes", type=int, default=23_040, help="default: SmolLM2's")
    parser.add_argument("--budget", type=int, default=512, help="maximum prompt tokens in a step")
    parser.add_argument("--target", type=float, default=1.0, help="maximum seconds of such a step")
    parser.add_argument("--like-llama-server", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    path = options.model or bench_model(build_peers(pins.pins(), jobs=2), INSTRUCT, "Q4_K_M").path
    for name, value in simulated(options, path).items():
        print(f"{name:<22} {value:9.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
