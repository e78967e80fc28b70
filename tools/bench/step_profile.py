"""Where a step's time goes: `python -m tools.bench.step_profile [--streams 1,16] [--model GGUF]`.
With `--walls`, the cost of the confinement: also runs each in a confined process, alternating.

Runs the engine's loop as the worker does, with its sender thread and a process that reads its
messages, but without HTTP. A wrapper times each part of a step, in steps in which all streams
decode. Between two passes over the weights all code runs with cold caches: in a loop of its own it
would be several times faster.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from builds import pins
from tools.bench.model import RANDOM, SIZES, bench_model
from tools.bench.peer_build import build_peers
from worker.confinement.walls import Walls
from worker.devices import select
from worker.devices.cpu.budget import cpu_budget
from worker.devices.plan.cells import a_part_each, context_options
from worker.devices.plan.placement import load_options
from worker.engine.limits import Limits
from worker.engine.loop import Loop
from worker.engine.model_runner import ModelRunner
from worker.engine.outbox import Outbox
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.speculation.lookup import Lookup
from worker.llama.constraint import GrammarVocabulary
from worker.llama.context import Context
from worker.llama.model import Model
from worker.llama.sampler import Sampler
from worker.models.gguf.header import read_header
from worker.wire.backends import BACKENDS, BackendName
from worker.wire.engine_settings import EngineSettings
from worker.wire.sampling import Sampling
from worker.wire.transport import SyncChannel
from worker.wire.work import InferenceRequest

N_PROMPT = 128
CONTEXT = 1024


class Profile:
    """Seconds of each part, by step."""

    def __init__(self) -> None:
        self.parts: defaultdict[str, list[float]] = defaultdict(list)
        self._now: defaultdict[str, float] = defaultdict(float)

    def timed(self, owner: Any, name: str, part: str) -> None:
        """Count a method of an object as a part."""
        inner: Callable[..., Any] = getattr(owner, name)
        seconds, clock = self._now, time.perf_counter

        def outer(*args: Any, **options: Any) -> Any:
            began = clock()
            try:
                return inner(*args, **options)
            finally:
                seconds[part] += clock() - began

        setattr(owner, name, outer)

    def end_step(self, *, keep: bool) -> None:
        if keep:
            for part, seconds in self._now.items():
                self.parts[part].append(seconds)
        self._now.clear()


def drain(end: socket.socket, senders: socket.socket) -> None:
    senders.close()
    while end.recv(1 << 16):
        pass


def profiled(
    path: Path,
    backend_name: BackendName,
    n_streams: int,
    n_steps: int,
    sampling: dict[str, Any],
    confine: bool = False,
) -> Profile:
    settings = EngineSettings(backend_name, slots=n_streams, confine=confine)
    own, other = socket.socketpair()
    reader = multiprocessing.get_context("fork").Process(target=drain, args=(other, own))
    reader.start()
    other.close()
    walls = Walls(settings, [path]) if confine else None
    selected = select.select_device(settings)
    model = Model(str(path), load_options(read_header(path), selected.devices))
    shape, threads = a_part_each(settings, CONTEXT), cpu_budget(None).threads
    context = Context(model, context_options(settings, shape, threads=threads, embeds=False))
    runner = ModelRunner(model, context, CONTEXT)
    limits = Limits(n_streams, CONTEXT * n_streams, 2048, prefill_budget=512)
    scheduler = Scheduler(limits)
    assert walls is None or all(wall.holds for wall in walls.close()), "this kernel lacks one"
    outbox = Outbox(SyncChannel(own))
    loop = Loop(runner, scheduler, outbox.put, drafter=Lookup())
    vocabulary = GrammarVocabulary(model)
    for index in range(n_streams):
        prompt = [(1000 + 37 * index + place) % model.n_vocab for place in range(N_PROMPT)]
        wish = Sampling(seed=index, ignore_eos=True, **sampling)
        request = InferenceRequest(str(index), tuple(prompt), wish, max_tokens=CONTEXT)
        loop.submit(Sequence(index, request, prompt, Sampler(model, wish, prompt, vocabulary)))
    profile = Profile()
    profile.timed(loop, "turn", "whole step")
    profile.timed(scheduler, "plan", "plan")
    profile.timed(loop, "_guess", "guess")
    profile.timed(runner, "fill", "fill the batch")
    profile.timed(runner, "decode", "decode (native)")
    profile.timed(loop, "_sample", "sample")
    profile.timed(scheduler, "advance", "advance")
    profile.timed(loop, "_accept", "text and stops")
    profile.timed(loop, "_flush", "hand to the sender")
    while len(profile.parts["whole step"]) < n_steps:
        loop.turn()
        decoding = [each.is_decoding for each in scheduler.running]
        profile.end_step(keep=len(decoding) == n_streams and all(decoding))
    outbox.flush()  # a sender that loses its reader ends the process
    own.shutdown(socket.SHUT_WR)  # a confined process may not signal others
    reader.join()
    context.close()
    model.close()
    return profile


def table(profiles: dict[str, Profile]) -> str:
    """Medians in µs; the own cost is everything in a step except decoding and sampling."""
    lines = ["| part, µs | " + " | ".join(profiles) + " |"]
    lines.append("| --- |" + " ---: |" * len(profiles))
    parts = next(iter(profiles.values())).parts

    def row(name: str, values: list[list[float]]) -> None:
        cells = (f"{statistics.median(each) * 1e6:.0f}" for each in values)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")

    for part in parts:
        row(part, [profile.parts[part] for profile in profiles.values()])
    row("own cost", [own_seconds(profile) for profile in profiles.values()])
    return "\n".join(lines)


def own_seconds(profile: Profile) -> list[float]:
    parts = profile.parts
    steps = zip(parts["whole step"], parts["decode (native)"], parts["sample"], strict=True)
    return [whole - decode - sample for whole, decode, sample in steps]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.step_profile", description=__doc__)
    parser.add_argument("--streams", default="1,16", help="comma-separated")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model", type=Path, help="default: the benchmark's random model")
    parser.add_argument("--backend", choices=[*BACKENDS], default="cpu")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--walls", action="store_true", help="run confined and unconfined, four times"
    )
    parser.add_argument(
        "--size", choices=sorted(SIZES), default="usual", help="size of the random model"
    )
    options = parser.parse_args(argv)
    path = options.model
    if path is None:
        peers = build_peers(pins.pins(), os.cpu_count() or 1, backend=options.backend)
        path = bench_model(peers, RANDOM, "Q4_K_M", SIZES[options.size]).path
    sampling = {"temperature": options.temperature}
    streams = [int(each) for each in options.streams.split(",")]
    profiles: defaultdict[str, Profile] = defaultdict(Profile)
    for confine in (False, True) * 4 if options.walls else (False,):
        for n in streams:
            given = (path, options.backend, n, options.steps, sampling, confine)
            with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
                found = pool.submit(profiled, *given).result()
            profile = profiles[f"{n} streams" + ", walls" * confine]
            for part, seconds in found.parts.items():
                profile.parts[part] += seconds
    print(table(profiles), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
