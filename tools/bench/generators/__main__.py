"""`python -m tools.bench.generators`: measures worker and llama-server with aiperf and guidellm.

Both servers run at the same time, with SmolLM2 and their own defaults, under closed loops of some
streams with prompts and answers of a fixed length. The numbers of a run are the generator's, by its
own clock and definitions; medians and ratios over the rounds are this benchmark's. Runs in its own
process; the generators are its children, in separate environments (`.venv-generators`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builds import pins
from tests import ROOT
from tools.bench import report
from tools.bench.errors import BenchError, exit_code
from tools.bench.model import INSTRUCT, bench_model
from tools.bench.peer_build import build_peers
from tools.bench.servers import HOST, RunningServer, llama_server_kind, worker_kind
from tools.environments import python_with

HERE = Path(__file__).parent
TOKENIZER = ROOT / "worker" / "assets" / "tiny-model"
"""A tokenizer's folder as transformers saves it, with which the generators count prompts."""
PROMPT_TOKENS, ANSWER_TOKENS = 128, 64
REQUESTS_PER_STREAM = 6
TIMEOUT_S = 500.0


@dataclass(frozen=True, slots=True)
class Run:
    """One closed loop: `n_requests` in total, `n_streams` at a time."""

    url: str
    model: str
    n_streams: int
    n_requests: int
    seed: int


def aiperf_command(run: Run, folder: Path) -> list[str]:
    """Each request is a chat, on `/v1/chat/completions`."""
    return [
        *("aiperf", "profile", "--url", run.url, "--model", run.model, "--streaming"),
        *("--endpoint-type", "chat", "--tokenizer", str(TOKENIZER)),
        *("--isl", str(PROMPT_TOKENS), "--osl", str(ANSWER_TOKENS)),
        *("--extra-inputs", "ignore_eos:true", "--use-server-token-count"),
        *("--concurrency", str(run.n_streams), "--request-count", str(run.n_requests)),
        *("--random-seed", str(run.seed), "--ui-type", "none", "--artifact-dir", str(folder)),
        *("--no-gpu-telemetry", "--no-server-metrics"),
    ]


def aiperf_metrics(folder: Path) -> dict[str, float]:
    found = json.loads((folder / "profile_export_aiperf.json").read_text("utf-8"))
    spread = {
        "ttft": found["time_to_first_token"],
        "itl": found["inter_token_latency"],
        "e2e": found["request_latency"],
    }
    metrics = {"output_tokens_per_s": found["output_token_throughput"]["avg"]}
    for name, values in spread.items():
        metrics |= {f"{name}_{at}_ms": values[at] for at in ("p50", "p95") if at in values}
    if found["request_count"]["avg"] < 1:
        raise BenchError("aiperf reports no successful request.")
    return metrics


def guidellm_command(run: Run, folder: Path) -> list[str]:
    """Each request is a text to continue, on `/v1/completions`."""
    lengths = f"prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}"
    return [
        *("guidellm", "benchmark", "--target", run.url, "--model", run.model),
        *("--processor", str(TOKENIZER), "--data", lengths, "--random-seed", str(run.seed)),
        *("--rate-type", "concurrent", "--rate", str(run.n_streams)),
        *("--max-requests", str(run.n_requests), "--disable-progress"),
        *("--output-path", str(folder / "report.json")),
    ]


def guidellm_metrics(folder: Path) -> dict[str, float]:
    [found] = json.loads((folder / "report.json").read_text("utf-8"))["benchmarks"]
    if found["request_totals"]["errored"] or not found["request_totals"]["successful"]:
        raise BenchError(f"guidellm counts {found['request_totals']}.")
    measured = {name: of["successful"] for name, of in found["metrics"].items() if of}
    metrics = {"output_tokens_per_s": measured["output_tokens_per_second"]["mean"]}
    for name, key, scale in (
        ("ttft", "time_to_first_token_ms", 1.0),
        ("itl", "inter_token_latency_ms", 1.0),
        ("e2e", "request_latency", 1e3),
    ):
        metrics[f"{name}_p50_ms"] = measured[key]["median"] * scale
        metrics[f"{name}_p95_ms"] = measured[key]["percentiles"]["p95"] * scale
    return metrics


@dataclass(frozen=True, slots=True)
class Generator:
    command: Callable[[Run, Path], list[str]]
    metrics: Callable[[Path], Mapping[str, float]]

    def measure(self, python: Path, run: Run) -> Mapping[str, float]:
        with tempfile.TemporaryDirectory(prefix="llorch-generator-") as name:
            program, *arguments = self.command(run, Path(name))
            done = subprocess.run(
                [str(python.with_name(program)), *arguments],
                cwd=name,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            if done.returncode != 0:
                said = (done.stderr or done.stdout)[-500:]
                raise BenchError(f"{program} ended with {done.returncode}: {said}")
            return self.metrics(Path(name))


GENERATORS = {
    "aiperf": Generator(aiperf_command, aiperf_metrics),
    "guidellm": Generator(guidellm_command, guidellm_metrics),
}


def run(options: argparse.Namespace) -> None:
    pythons = {
        name: python_with(HERE / f"{name}.txt", ROOT / ".venv-generators" / name)
        for name in options.only
    }
    peers = build_peers(pins.pins(), options.jobs, None, backend="cpu")
    model = bench_model(peers, INSTRUCT, "Q4_K_M")
    results: report.Results = {}
    kinds = [worker_kind("worker", []), llama_server_kind(peers, [])]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llorch-bench-")))
        servers = []
        for kind in kinds:
            servers.append(RunningServer(kind, model.path, None, scratch))
            stack.callback(servers[-1].stop)
        for number in range(options.rounds + 1):  # the first warms up
            for name, python in pythons.items():
                for n_streams in options.streams:
                    load = f"{name}, {n_streams} at a time"
                    for server in servers[:: 1 if number % 2 else -1]:
                        url = f"http://{HOST}:{server.port}"
                        n_requests = n_streams * REQUESTS_PER_STREAM
                        seed = number * 1000 + n_streams
                        asked = Run(url, server.model_id, n_streams, n_requests, seed)
                        found = GENERATORS[name].measure(python, asked)
                        if number:
                            subjects = results.setdefault(load, {})
                            subjects.setdefault(server.kind.name, {})[number] = found
                        rate = found["output_tokens_per_s"]
                        print(f"  run {number} {load} {server.kind.name} {rate:.1f}", flush=True)
    machine: dict[str, Any] = report.machine()
    print(f"\n{machine['cpu']}, {machine['cores']} cores, {options.rounds} rounds")
    print(report.table(report.summarise(results, [kind.name for kind in kinds])))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.generators", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(GENERATORS), default=list(GENERATORS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--jobs", type=int, default=2, help="parallel jobs of llama-server's build")
    options = parser.parse_args(argv)
    if min(options.rounds, *options.streams) < 1:
        parser.error("--rounds and --streams are 1 or more.")
    return options


def main(argv: list[str]) -> int:
    return exit_code(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
