"""Runs the chosen loads on the chosen servers in turn, round by round.

All servers of a round run at the same time, idle except for the one under load, so that compared
runs are seconds apart; the order rotates from round to round. Start-up and memory are measured with
a server that runs alone. Server, client and runner share the machine's cores: the client is the
same for every server, and its share is reported. Runs in the benchmark's process.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tools.bench import agents, beside, cancel, forms, texts
from tools.bench.client import drive
from tools.bench.errors import BenchError
from tools.bench.limit import limit_of
from tools.bench.loads import (
    JOIN_SHAPE,
    LOADS,
    OPEN_SHAPE,
    SAMPLINGS,
    STREAMS_SHAPE,
    Flavour,
    Load,
    Metrics,
    capacity_load,
    open_load,
    read,
)
from tools.bench.model import EMBEDDER, GEMMA, INSTRUCT, RANDOM, RANKER, BenchModel
from tools.bench.peer_build import Peers
from tools.bench.report import LIMIT, REFERENCE, Results
from tools.bench.servers import HOST, RunningServer, ServerKind, Shape

MIB = 1 << 20
SETTLE_S, QUICK_SETTLE_S = 0.3, 0.05
STARTS = {"start-instruct": INSTRUCT, "start-gemma": GEMMA}
"""Loads that measure a start on defaults, and the model of each."""
ALL = LOADS | agents.LOADS | forms.LOADS | beside.LOADS | texts.LOADS
"""The closed loads. There are also starts, open arrivals and cancels."""
OPEN = ("open50", "open80", "open110")
WARM_UPS = {EMBEDDER: texts.LOADS["embed1"], RANKER: texts.LOADS["rank32"]}
"""Loads for models that generate no text."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A column of the table: a server, and the dialect in which it gets requests."""

    name: str
    kind: ServerKind
    flavour: Flavour = "completions"
    is_worker: bool = False


@dataclass(slots=True)
class Runner:
    subjects: list[Subject]
    loads: list[str]
    models: Callable[[str], BenchModel]
    peers: Peers
    sampling: str
    with_limit: bool
    repeats: int
    scratch: Path
    n_arrivals: int = 60
    quick: bool = False
    results: Results = field(default_factory=dict)
    capacities: list[float] = field(default_factory=list)
    """llama-server's capacity in requests a second, as measured in each round."""

    def run_round(self, number: int) -> None:
        order = self._rotated(self.subjects, number)
        if "start" in self.loads:
            for subject in order:
                if subject.flavour == "completions":
                    self._keep("start", subject.name, number, self._start_alone(subject, number))
        for name, model in STARTS.items():
            if name in self.loads:
                for subject in order:
                    if subject.flavour == "completions":
                        self._keep(name, subject.name, number, self._default_start(subject, model))
        chosen = [ALL[name] for name in self.loads if name in ALL]
        if self.quick:
            chosen = [load.quick() for load in chosen]
        for model, shape in dict.fromkeys((load.model, load.shape) for load in chosen):
            loads = [load for load in chosen if (load.model, load.shape) == (model, shape)]
            self._run_shape(model, shape, loads, order, number)
        if shares := [int(name.removeprefix("open")) for name in self.loads if name in OPEN]:
            self._run_open(shares, order, number)
        if "cancel" in self.loads:
            for subject in order:
                if subject.is_worker and subject.flavour == "completions":
                    self._keep("cancel", subject.name, number, self._cancel(subject, number))

    def _run_shape(
        self, model: str, shape: Shape | None, loads: list[Load], order: list[Subject], number: int
    ) -> None:
        if self.models(model).flags or self.models(model).peer_flags:
            order = [each for each in order if each.is_worker or each.name == REFERENCE]
        with self._servers(order, model, shape) as servers:
            for repeat in range(self.repeats):
                run = (number - 1) * self.repeats + repeat + 1
                for index, load in enumerate(loads):
                    for subject in self._rotated(order, index + repeat):
                        if load.requests_of is None or subject.flavour == "completions":
                            metrics = self._measure(subject, servers[subject.kind.name], load, run)
                            self._keep(load.name, subject.name, run, metrics)
                    if self.with_limit and model == RANDOM:
                        limit = limit_of(self.peers, self.models(RANDOM).path, load.name)
                        if limit is not None:
                            self._keep(load.name, LIMIT, run, limit)

    def _run_open(self, shares: list[int], order: list[Subject], number: int) -> None:
        """Measure the capacity of the reference first; then all servers get shares of that."""
        order = [subject for subject in order if subject.flavour == "completions"]
        reference = next((s for s in order if s.name == REFERENCE), order[0])
        with self._servers(order, RANDOM, OPEN_SHAPE) as servers:
            load = capacity_load(self.n_arrivals // 2)
            found = self._measure(reference, servers[reference.kind.name], load, number)
            capacity = (self.n_arrivals // 2) / found["wall_s"]
            self.capacities.append(capacity)
            print(f"  {reference.name} handles {capacity:.2f} requests a second", flush=True)
            for index, share in enumerate(shares):
                load = open_load(share, self.n_arrivals, capacity)
                for subject in self._rotated(order, index):
                    metrics = self._measure(subject, servers[subject.kind.name], load, number)
                    self._keep(load.name, subject.name, number, metrics)

    @contextlib.contextmanager
    def _servers(
        self, order: list[Subject], model: str, shape: Shape | None
    ) -> Iterator[dict[str, RunningServer]]:
        """The servers of all subjects, running at the same time."""
        with contextlib.ExitStack() as stack:
            servers: dict[str, RunningServer] = {}
            for subject in order:
                if subject.kind.name not in servers:
                    server = stack.enter_context(self._server(subject.kind, shape, model))
                    servers[subject.kind.name] = server
            yield servers

    @contextlib.contextmanager
    def _server(
        self, kind: ServerKind, shape: Shape | None, model: str = RANDOM
    ) -> Iterator[RunningServer]:
        served = self.models(model)
        flags = served.flags + (served.peer_flags if kind.name == REFERENCE else ())
        server = RunningServer(kind.with_flags(flags), served.path, shape, self.scratch)
        try:
            self._warm_up(server, WARM_UPS.get(model, LOADS["streams1"]))
            yield server
        except BenchError as error:
            raise BenchError(f"{error} Last lines of {kind.name}: {server.log_tail()}") from error
        finally:
            server.stop()

    def _warm_up(self, server: RunningServer, load: Load) -> None:
        prompts = load.make(random.Random(0), self.models(RANDOM).words)
        requests = load.requests(prompts, server.model_id, SAMPLINGS[self.sampling])
        read(
            load, drive(HOST, server.port, requests, load.timeout_s * server.kind.patience), prompts
        )

    def _measure(self, subject: Subject, server: RunningServer, load: Load, run: int) -> Metrics:
        words = self.models(load.model).words
        prompts = load.make(self._random(load.name, subject, run), words)
        sampling = SAMPLINGS[load.sampling or self.sampling]
        tag = f"{load.name}-{subject.name}-{run}"
        requests = load.requests(prompts, server.model_id, sampling, subject.flavour, tag)
        time.sleep(QUICK_SETTLE_S if self.quick else SETTLE_S)
        before = _Clocks.now(server)
        steps_before = self._engine_gauges(subject, server)
        with burning() if load.busy else contextlib.nullcontext():
            driven = drive(HOST, server.port, requests, load.timeout_s * server.kind.patience)
        after = _Clocks.now(server)
        try:
            metrics = read(load, driven, prompts)
        except BenchError as error:
            raise BenchError(f"{subject.name}, {load.name}: {error}") from error
        metrics |= before.shares_until(after) | {"wall_s": driven.wall_s}
        steps_after = self._engine_gauges(subject, server)
        n_steps = steps_after.get("steps", 0) - steps_before.get("steps", 0)
        if n_steps > 0:
            spent_s = steps_after["overhead_seconds"] - steps_before["overhead_seconds"]
            metrics["step_overhead_ms"] = spent_s / n_steps * 1e3
        return metrics

    def _random(self, load: str, subject: Subject, run: int) -> random.Random:
        # The dialects of a server get different texts, or the second would hit the first's cache.
        return random.Random(f"{load}/{subject.flavour}/{run}")

    def _engine_gauges(self, subject: Subject, server: RunningServer) -> dict[str, float]:
        if not subject.is_worker:
            return {}
        prefix = "worker_engine_"
        gauges = cancel.Gauges(server.port)
        try:
            read = gauges.read()
        finally:
            gauges.close()
        return {key.removeprefix(prefix): v for key, v in read.items() if key.startswith(prefix)}

    def _start_alone(self, subject: Subject, number: int) -> Metrics:
        with self._server(subject.kind, STREAMS_SHAPE) as server:
            for name in ("streams16", "shared"):
                self._measure(subject, server, LOADS[name], -number)
            return _start_of(server)

    def _default_start(self, subject: Subject, model: str) -> Metrics:
        """Start a server on its own defaults; returns its start time and its memory once it is
        ready."""
        server = RunningServer(subject.kind, self.models(model).path, None, self.scratch)
        try:
            time.sleep(QUICK_SETTLE_S if self.quick else SETTLE_S)
            return _start_of(server)
        finally:
            server.stop()

    def _cancel(self, subject: Subject, number: int) -> Metrics:
        kind = subject.kind
        with self._server(kind.with_flags(cancel.FLAGS), JOIN_SHAPE) as server:
            rng = random.Random(f"cancel/{number}")
            return cancel.measure_cancel(server, rng, self.models(RANDOM).words)

    def _keep(self, load: str, subject: str, run: int, metrics: Metrics) -> None:
        self.results.setdefault(load, {}).setdefault(subject, {})[run] = metrics
        shown = (
            "output_tokens_per_s",
            "texts_per_s",
            "join_itl_p95_ms",
            "startup_s",
            "cancel_decode_ms",
        )
        first = next((f"{key} {metrics[key]:.2f}" for key in shown if key in metrics), "")
        print(f"  run {run:<3} {load:<10} {subject:<16} {first}", flush=True)

    @staticmethod
    def _rotated(subjects: list[Subject], by: int) -> list[Subject]:
        if not subjects:
            return []
        by %= len(subjects)
        return subjects[by:] + subjects[:by]


def _start_of(server: RunningServer) -> Metrics:
    """Return the time of a start, and the memory that the server uses."""
    memory = server.memory()
    metrics = {"startup_s": server.startup_s, "rss_peak_mib": memory.peak_rss_bytes / MIB}
    return metrics | ({} if memory.pss_bytes is None else {"pss_mib": memory.pss_bytes / MIB})


@contextlib.contextmanager
def burning() -> Iterator[None]:
    """Keep half of the cores (at least one) busy, as they are on most machines."""
    count = max(1, (os.cpu_count() or 2) // 2)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@dataclass(frozen=True, slots=True)
class _Clocks:
    """CPU times so far: of the server's main process, its children, this process, the machine."""

    at_s: float
    main_s: float
    children_s: float
    own_s: float
    machine_s: float

    @classmethod
    def now(cls, server: RunningServer) -> _Clocks:
        per_process = server.cpu_seconds()
        main_s = per_process.pop(server.process.pid, 0.0)
        times = psutil.cpu_times()
        busy_s = sum(times) - times.idle - getattr(times, "iowait", 0.0)
        # Linux includes guests' time in `user`.
        busy_s -= getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        children_s = sum(per_process.values())
        return cls(time.perf_counter(), main_s, children_s, time.process_time(), busy_s)

    def shares_until(self, later: _Clocks) -> Metrics:
        wall_s = later.at_s - self.at_s
        main_s, children_s = later.main_s - self.main_s, later.children_s - self.children_s
        own_s = later.own_s - self.own_s
        foreign_s = later.machine_s - self.machine_s - main_s - children_s - own_s
        return {
            "main_cpu_share": main_s / wall_s,
            "child_cpu_share": children_s / wall_s,
            "foreign_cpu_share": max(0.0, foreign_s / wall_s),
        }
