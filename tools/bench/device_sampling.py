"""What sampling on the device would cost: `python -m tools.bench.device_sampling [--streams 1,16]`.

llama.cpp can sample inside its compute graph (`llama_set_sampler`): each stream gets nodes of its
own after the logits. This measures a step of the same streams both ways, with the same
parameters: sampled on the host, as the worker does, and by llama.cpp's samplers on the device. It
also measures the step after a request with other parameters has come, for which llama.cpp rebuilds
all graphs, and the size of the graphs.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from builds import pins
from tools.bench.model import BIG_VOCABULARY, SIZES, bench_model
from tools.bench.peer_build import build_peers
from worker.devices import select
from worker.devices.plan.cells import a_part_each, context_options
from worker.devices.plan.placement import load_options
from worker.llama import library
from worker.llama.batch import Batch
from worker.llama.chain import Chain, Undo
from worker.llama.context import Context
from worker.llama.draw import dice
from worker.llama.model import Model
from worker.models.gguf.header import read_header
from worker.wire.backends import BACKENDS, BackendName
from worker.wire.engine_settings import EngineSettings
from worker.wire.sampling import Sampling

CONTEXT = 1024
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "usual": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
}
_NODES = re.compile(r"graph: nodes = (\d+).*, splits = (\d+)")
_BUFFER = re.compile(r"(\w+) compute buffer size = +([\d.]+)")


class Streams:
    """A number of sequences of a context, which decode one token each in a step."""

    def __init__(self, model: Model, context: Context, n: int) -> None:
        self.context, self.n, self.length = context, n, 0
        self.n_vocab = model.n_vocab
        self._batch = Batch(n)

    def decode(self) -> None:
        self._batch.clear()
        for slot in range(self.n):
            self._batch.add(slot, self.length, [1000 + slot], logits=True)
        assert self.context.decode(self._batch) == "ok"
        self.length += 1

    def step_ms(self, n_steps: int, sample: Callable[[int], int]) -> tuple[float, float]:
        """Return the medians of a step including sampling, and of the sampling."""
        whole, draws = [], []
        for _ in range(n_steps):
            began = time.perf_counter()
            self.decode()
            decoded = time.perf_counter()
            for slot in range(self.n):
                assert 0 <= sample(slot) < self.n_vocab
            end = time.perf_counter()
            whole.append((end - began) * 1000)
            draws.append((end - decoded) * 1000)
        return statistics.median(whole), statistics.median(draws)


def on_the_host(streams: Streams, sampling: Sampling) -> Callable[[int], int]:
    chain = Chain(sampling, {}, Undo(), streams.n_vocab)
    return lambda slot: chain.draw(streams.context.logits(slot), dice(slot, streams.length))


def on_the_device(streams: Streams) -> Callable[[int], int]:
    flat, pointer = library.load(), streams.context.pointer
    return lambda row: int(flat.llama_get_sampled_token_ith(pointer, row))


def attach(streams: Streams, slot: int, sampling: Sampling) -> Any:
    """Set llama.cpp's samplers of a sequence; they must stay alive until they are replaced."""
    flat = library.load()
    chain = flat.llama_sampler_chain_init(flat.llama_sampler_chain_default_params())
    if sampling.temperature == 0:
        steps = [flat.llama_sampler_init_greedy()]
    else:
        steps = [flat.llama_sampler_init_top_k(sampling.top_k)] if sampling.top_k else []
        if sampling.top_p < 1:
            steps.append(flat.llama_sampler_init_top_p(sampling.top_p, 1))
        if sampling.min_p > 0:
            steps.append(flat.llama_sampler_init_min_p(sampling.min_p, 1))
        steps.append(flat.llama_sampler_init_temp(sampling.temperature))
        steps.append(flat.llama_sampler_init_dist(slot))
    for step in steps:
        flat.llama_sampler_chain_add(chain, step)
    assert flat.llama_set_sampler(streams.context.pointer, slot, chain)
    return chain


def graph(lines: list[str]) -> str:
    """What llama.cpp reports about the graphs that it built last."""
    nodes = [match for line in lines if (match := _NODES.search(line))][-1]
    found = [match for line in lines if (match := _BUFFER.search(line))]
    buffers = {match[1]: match[2] for match in found}
    shown = ", ".join(f"{size} MiB on {on}" for on, size in buffers.items())
    return f"{nodes[1]} nodes in {nodes[2]} splits, {shown}"


def measure(path: Path, backend: BackendName, n: int, n_steps: int) -> None:
    settings = EngineSettings(backend, slots=n)
    selected = select.select_device(settings)
    model = Model(str(path), load_options(read_header(path), selected.devices))
    options = context_options(settings, a_part_each(settings, CONTEXT), threads=2, embeds=False)
    for name, parameters in PARAMETERS.items():
        sampling = Sampling(seed=1, **parameters)
        context = Context(model, options)
        streams = Streams(model, context, n)
        streams.decode()
        host_ms, host_draws = streams.step_ms(n_steps, on_the_host(streams, sampling))
        before = graph(list(context.load_log))
        with library.log.capture() as lines:
            chains = [attach(streams, slot, sampling) for slot in range(n)]
            streams.decode()
        device_ms, _ = streams.step_ms(n_steps, on_the_device(streams))
        changes = []
        for _ in range(5):
            chains.append(attach(streams, 0, sampling))
            began = time.perf_counter()
            streams.decode()
            changes.append((time.perf_counter() - began) * 1000)
        change_ms = statistics.median(changes) - device_ms
        print(
            f"| {n} | {name} | {host_ms:.1f} ({host_draws:.1f}) | {device_ms:.1f} | "
            f"{change_ms:.1f} | {before} | {graph(lines)} |",
            flush=True,
        )
        context.close()
        for chain in chains:
            library.load().llama_sampler_free(chain)
    model.close()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.device_sampling", description=__doc__
    )
    parser.add_argument("--streams", default="1,16", help="comma-separated")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--model", type=Path, help="default: the benchmark's with 151,936 tokens")
    parser.add_argument("--backend", choices=[*BACKENDS], default="cpu")
    parser.add_argument(
        "--size", choices=sorted(SIZES), default="usual", help="size of the random model"
    )
    options = parser.parse_args(argv)
    path = options.model
    if path is None:
        peers = build_peers(pins.pins(), os.cpu_count() or 1, backend=options.backend)
        path = bench_model(peers, BIG_VOCABULARY, "Q4_K_M", SIZES[options.size]).path
    print(
        "| streams | parameters | host, ms (draws) | device, ms | change, ms | graph | sampling |"
    )
    print("| ---: | --- | ---: | ---: | ---: | --- | --- |", flush=True)
    for n in map(int, options.streams.split(",")):
        measure(path, options.backend, n, options.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
