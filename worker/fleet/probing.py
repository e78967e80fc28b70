"""Probes the workers, and gives up those that have fallen silent.

Runs on the gateway's event loop. A worker that is suspended, or whose machine is cut off, closes no
connection; its streams would hang for ever. `/health` never waits for the engine, so a worker that
misses three probes is taken for lost, and its exchanges are aborted.
"""

from __future__ import annotations

import asyncio

from worker.fleet.upstream import fetch
from worker.fleet.workers import Worker, WorkerTable

PROBE_EVERY_SECONDS = 2.0
MAX_MISSES = 3
"""Probes in a row without an answer. A silent worker is found after at most 3 · (2 + 5) seconds."""


async def watch(table: WorkerTable) -> None:
    """Probe all workers for ever, at the same time; abort the exchanges of a silent one."""
    while True:
        await asyncio.gather(*map(_probe, table.workers()))
        await asyncio.sleep(PROBE_EVERY_SECONDS)


async def _probe(worker: Worker) -> None:
    answer = await fetch(worker.address, "GET", "/health")
    worker.misses = 0 if answer is not None else worker.misses + 1
    if worker.misses >= MAX_MISSES:
        for abort in list(worker.aborts):
            abort()
