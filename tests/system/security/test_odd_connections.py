"""Ten thousand connections of every odd kind cost the others nothing that they would notice."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from tests.conftest import StartWorker
from tests.process.api.test_crowd import health_times, p99
from tests.support.worker import ROOT, until

MODULE = (sys.executable, "-m", "tests.system.security.odd_connections")
N_CONNECTIONS, N_STREAMS, SECONDS, SEED = 10_000, 16, 60, 7
MOST_MS, MOST_GROWTH, LEAST_SHARE = 20.0, 50 * 2**20, 0.9


def spawn(*arguments: object) -> subprocess.Popen[str]:
    line = [*MODULE, *map(str, arguments)]
    return subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def said(process: subprocess.Popen[str]) -> Any:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return json.loads(output)


@contextmanager
def most_bytes(pid: int) -> Iterator[list[int]]:
    """The largest resident set of a process within the block."""
    ended, found, process = threading.Event(), [0], psutil.Process(pid)

    def look() -> None:
        while not ended.wait(0.05):
            found[0] = max(found[0], process.memory_info().rss)

    thread = threading.Thread(target=look)
    thread.start()
    yield found
    ended.set()
    thread.join()


@pytest.mark.long
def test_odd_connections_beside_streams(start_worker: StartWorker, counts: list[str]) -> None:
    """Speed is compared with the same connections to a second worker, which nobody else uses: what
    they cost the machine is in both."""
    worker, other = (start_worker("--slots", str(N_STREAMS)) for _ in range(2))
    rates, times, outcomes = {}, {}, Counter[str]()
    for name, attacked in (("other", other), ("worker", worker)):
        streams = spawn("streams", worker.port, N_STREAMS)
        until(lambda: worker.get("/health").json()["running"] == N_STREAMS, 60, lambda: "slow")
        before = psutil.Process(worker.pid).memory_info().rss
        with health_times(worker) as times[name], most_bytes(worker.pid) as most:
            attack = spawn("attack", attacked.port, N_CONNECTIONS, SEED, SECONDS)
            outcomes = Counter(said(attack))
        growth = most[0] - before
        rates[name] = statistics.mean(said(streams)[2:-2])
    share = rates["worker"] / rates["other"]
    health, control = p99(times["worker"]["health"]), p99(times["worker"]["control"])
    counts.append(
        f"{N_CONNECTIONS:,} odd connections beside {N_STREAMS} streams: "
        f"/health p99 {health:.1f} ms (a server that does nothing: {control:.1f}), "
        f"API process +{growth / 2**20:.0f} MiB, {rates['worker']:.0f} tokens/s, "
        f"{share:.3f} of those beside the same connections to another worker"
    )
    counts.append(json.dumps(outcomes, sort_keys=True))
    assert sum(outcomes.values()) == N_CONNECTIONS
    assert not [name for name in outcomes if name.split()[-1] in ("late", "500", "503", "refused")]
    until(lambda: len(psutil.Process(worker.pid).net_connections()) < 10, 60, lambda: "left open")
    assert worker.logs("request.broken") == [] and worker.logs("engine.crashed") == []
    assert health - control < MOST_MS
    assert growth < MOST_GROWTH
    assert share > LEAST_SHARE
