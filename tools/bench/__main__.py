"""`python -m tools.bench`: reads the flags, builds what is missing, runs, reports."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from builds import pins, store
from tools.bench import chart, report
from tools.bench.errors import BenchError, exit_code
from tools.bench.loads import JOIN_SHAPE, SAMPLINGS, STREAMS_SHAPE
from tools.bench.model import SIZES, bench_model
from tools.bench.peer_build import Peers, build_peers
from tools.bench.runner import ALL, OPEN, STARTS, Runner, Subject
from tools.bench.servers import example_kind, llama_server_kind, patient, worker_kind
from worker.wire.backends import BACKENDS

PEERS = ("worker", "worker-execute", "llama-server", "example-server", report.LIMIT)
ALL_LOADS = ("start", *STARTS, *ALL, *OPEN, "cancel")
SHORT = ("streams1", "streams4", "streams16")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    listed = "comma-separated, of: "
    parser.add_argument("--only", help=f"without it all, {listed}{', '.join(PEERS)}")
    parser.add_argument("--loads", help=f"without it all, {listed}{', '.join(ALL_LOADS)}")
    parser.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="compare this worker only with that of another checkout, in turn, "
        f"unless --only adds servers; without --loads: {', '.join(SHORT)} (about 3 minutes)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="each load once with a quarter of its tokens, random models of two layers, worker and "
        "llama-server only (five minutes): shows regressions",
    )
    parser.add_argument("--backend", choices=[*BACKENDS], default="cpu")
    parser.add_argument("--rounds", type=int, help="3; 1 with --quick")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each load within a round")
    parser.add_argument(
        "--arrivals", type=int, help="requests of each open load: 60; 5 with --quick"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="factor for the time limits of starts, loads and waits, and for --stall-timeout",
    )
    parser.add_argument("--quant", default="Q4_K_M", help="Q4_K_M, Q8_0, F16 …")
    parser.add_argument(
        "--size",
        choices=sorted(SIZES),
        default="usual",
        help="size of the random models: 190 M parameters, or 8 B for a GPU",
    )
    parser.add_argument("--sampling", choices=sorted(SAMPLINGS), default="greedy")
    parser.add_argument("--worker-flags", default="", help="more flags for the worker")
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=FLAGS",
        help="another worker with these flags, to compare settings; repeatable; "
        "{draft} in them stands for the draft model of the load's random model",
    )
    parser.add_argument("--llama-server-flags", default="", help="more flags for llama-server")
    parser.add_argument("--json", type=Path, help="folder for the figures (default: the cache)")
    parser.add_argument(
        "--chart", type=Path, metavar="SVG", help="draw a chart of the worker against llama-server"
    )
    parser.add_argument("--sdist", type=Path, help="the pinned sdist, to avoid fetching it")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="parallel jobs of the build"
    )
    options = parser.parse_args(argv)
    options.rounds = options.rounds if options.rounds is not None else 1 if options.quick else 3
    if options.arrivals is None:
        options.arrivals = 5 if options.quick else 60
    only: tuple[str, ...] = ("worker",) if options.before else PEERS
    loads = SHORT if options.before and not options.quick else ALL_LOADS
    if options.quick and not options.before:
        only = ("worker", "llama-server")
    options.only = list(only) if options.only is None else _chosen(options.only, PEERS, "--only")
    if options.loads is None:
        options.loads = list(loads)
    else:
        options.loads = _chosen(options.loads, ALL_LOADS, "--loads")
    if options.before and not (options.before / "worker" / "cli.py").is_file():
        raise BenchError(f"--before {options.before}: it is not a checkout of the worker.")
    if options.chart and not {"worker", report.REFERENCE} <= set(options.only):
        raise BenchError("--chart compares worker and llama-server; --only leaves one out.")
    for flag in ("rounds", "repeats", "arrivals"):
        if getattr(options, flag) < 1:
            raise BenchError(f"--{flag} is {getattr(options, flag)}; it must be 1 or more.")
    return options


def _chosen(text: str, known: tuple[str, ...], flag: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise BenchError(f"{flag} does not know {name!r}; choose from {', '.join(known)}.")
    return [name for name in known if name in names]


def subjects_of(options: argparse.Namespace, peers: Peers) -> list[Subject]:
    flags = [*patient(options.patience), *shlex.split(options.worker_flags)]
    subjects = []
    if "worker" in options.only or "worker-execute" in options.only:
        kind = worker_kind("worker", flags, options.backend)
        if "worker" in options.only:
            subjects.append(Subject("worker", kind, is_worker=True))
        if "worker-execute" in options.only:
            subjects.append(Subject("worker-execute", kind, "execute", is_worker=True))
    if options.before:
        kind = worker_kind(report.BEFORE, flags, options.backend, options.before.resolve())
        subjects.append(Subject(report.BEFORE, kind, is_worker=True))
    for variant in options.variant:
        name, mark, more = variant.partition("=")
        if not (name and mark) or name in (*PEERS, report.BEFORE):
            raise BenchError(f"--variant {variant!r} is not NAME=FLAGS with a name of its own.")
        kind = worker_kind(name, [*flags, *shlex.split(more)], options.backend)
        subjects.append(Subject(name, kind, is_worker=True))
    if "llama-server" in options.only:
        kind = llama_server_kind(peers, shlex.split(options.llama_server_flags))
        subjects.append(Subject("llama-server", kind))
    if "example-server" in options.only:
        subjects.append(Subject("example-server", example_kind(peers)))
    patience = options.patience
    return [replace(each, kind=replace(each.kind, patience=patience)) for each in subjects]


def run(options: argparse.Namespace) -> None:
    peers = build_peers(pins.pins(), options.jobs, options.sdist, backend=options.backend)
    size = SIZES["quick" if options.quick else options.size]
    models = cache(lambda name: bench_model(peers, name, options.quant, size))
    with tempfile.TemporaryDirectory(prefix="llorch-bench-") as scratch:
        runner = Runner(
            subjects_of(options, peers),
            options.loads,
            models,
            peers,
            options.sampling,
            report.LIMIT in options.only,
            options.repeats,
            Path(scratch),
            options.arrivals,
            options.quick,
        )
        machine = report.machine()
        for number in range(1, options.rounds + 1):
            runner.run_round(number)
    names = [subject.name for subject in runner.subjects]
    summary = report.summarise(runner.results, names)
    print(f"\n{machine['cpu']}, {machine['cores']} cores, {options.quant}, {options.rounds} rounds")
    print(report.table(summary))
    for load in report.disturbed(runner.results):
        print(f"Other programs used the machine during {load}: take the figures with care.")
    path = options.json or _default_json()
    settings = {
        "quant": options.quant,
        "size": asdict(size),
        "sampling": options.sampling,
        "streams_shape": [STREAMS_SHAPE.slots, STREAMS_SHAPE.context_per_slot],
        "join_shape": [JOIN_SHAPE.slots, JOIN_SHAPE.context_per_slot],
        "subjects": {subject.name: subject.kind.flags for subject in runner.subjects},
        "llama_cpp_python": peers.version,
        "llama_cpp_commit": peers.commit,
        "requests_per_s_of_open_loads": runner.capacities,
        "peer_cmake_flags": peers.flags,
        "compiler": peers.compiler,
    }
    content = {"machine": machine, "settings": settings, "summary": summary}
    report.write_json(path, content | {"runs": runner.results})
    print(f"Figures: {path}")
    if options.chart:
        chart.draw(options.chart, summary)


def _default_json() -> Path:
    return store.folder("bench", "results") / time.strftime("%Y%m%d-%H%M%S.json")


def main(argv: list[str]) -> int:
    return exit_code(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
