"""Probes the workers, and gives up those that have fallen silent.

Runs on the gateway's event loop. A worker that is suspended, or whose machine is cut off, closes no
connection; its streams would hang for ever. `/health` never waits for the engine, so a worker that
misses three probes is taken for lost, and its exchanges are aborted.
"""

from __future__ import annotations

import asyncio

from worker.fleet.table import Table, Worker
from worker.fleet.upstream import fetch

PROBE_EVERY_SECONDS = 2.0
MAX_MISSES = 3
"""Probes in a row without an answer. A silent worker is found after at most 3 · (2 + 5) seconds."""


async def watch(table: Table) -> None:
    """Probe all workers for ever, concurrently; abort the exchanges of a silent one."""
    probing: dict[str, asyncio.Task[None]] = {}
    while True:
        workers = {worker.id: worker for worker in table.workers()}
        for id, worker in workers.items():
            if id not in probing or probing[id].done():
                probing[id] = asyncio.create_task(_probe(worker))
        probing = {id: task for id, task in probing.items() if not task.done() or id in workers}
        await asyncio.sleep(PROBE_EVERY_SECONDS)


async def _probe(worker: Worker) -> None:
    answer = await fetch(worker.address, "GET", "/health")
    worker.misses = 0 if answer is not None else worker.misses + 1
    if worker.misses >= MAX_MISSES:
        for abort in list(worker.aborts):
            abort()
