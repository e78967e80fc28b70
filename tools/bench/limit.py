"""The limit: the same work in llama-batched-bench, without HTTP, scheduler or text.

Runs in the benchmark's process and starts llama-batched-bench as a child.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tools.bench.errors import BenchError
from tools.bench.loads import STREAMS_SHAPE, Metrics
from tools.bench.peer_build import Peers

TIMEOUT_S = 180.0
N_CELLS = STREAMS_SHAPE.slots * STREAMS_SHAPE.context_per_slot


def limit_of(peers: Peers, model: Path, load: str) -> Metrics | None:
    """Return output tokens per second for a load's work; `None` for a load without such a limit.

    The prefill yields the first token: n tokens are a prefill and n - 1 steps.
    """
    if load.startswith("streams"):
        n_streams = int(load.removeprefix("streams"))
        run = _bench(peers, model, 128, 63, n_streams)
        return {"output_tokens_per_s": n_streams * 64 / (run["t_pp"] + run["t_tg"])}
    if load == "shared":
        return {"output_tokens_per_s": _shared_limit(peers, model)}
    return None


def _shared_limit(peers: Peers, model: Path) -> float:
    """The common 461 tokens once, 16 suffixes of 51, then 31 steps of 16.

    With a unified cache the sequences share cells, but each query scans all of them; the limit is
    the better of both layouts.
    """
    tails = _bench(peers, model, 51, 1, 16)["t_pp"]
    times = []
    for layout in ((), ("-kvu",)):
        common = _bench(peers, model, 461, 1, 16, "-pps", *layout)["t_pp"]
        decode = _bench(peers, model, 512, 31, 16, "-pps", *layout)["t_tg"]
        times.append(common + tails + decode)
    return 16 * 32 / min(times)


def _bench(
    peers: Peers, model: Path, n_prompt: int, n_out: int, n_streams: int, *flags: str
) -> dict[str, float]:
    command = [
        *(peers.program("llama-batched-bench"), "-m", str(model), "-c", str(N_CELLS)),
        *("-npp", str(n_prompt), "-ntg", str(n_out), "-npl", f"{n_streams},{n_streams}"),
        *("--output-format", "jsonl", *flags),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        )
    except subprocess.SubprocessError as error:
        raise BenchError(f"llama-batched-bench failed: {error}") from error
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(rows) != 2:
        raise BenchError("llama-batched-bench printed no result.")
    # The first run touches the memory for the first time, which a server has already done.
    warm: dict[str, float] = rows[1]
    return warm
