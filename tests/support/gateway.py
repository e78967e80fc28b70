"""A fleet's gateway in a thread of the test's process, in front of running workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvloop

from tests.support.worker import WorkerProcess
from worker.api.http.server import server_for
from worker.fleet.gateway import Gateway
from worker.fleet.settings import Fleet
from worker.fleet.workers import Worker, WorkerTable, watch
from worker.sockets import listen


def token_of(id: str) -> str:
    """Return the token with which a test starts the worker with that id."""
    return f"secret of {id}"


def gateway_before(groups: Mapping[str, list[WorkerProcess]], **fleet: Any) -> Gateway:
    """Run a gateway; workers are named after their group and index in it, such as `one-0`."""
    gateway = Gateway(table_of(groups))
    settings = {"workers": [{"name": group, "settings": {"slots": 4}} for group in groups], **fleet}
    gateway.use(Fleet.model_validate(settings))
    return gateway


def table_of(groups: Mapping[str, list[WorkerProcess]]) -> WorkerTable:
    table = WorkerTable()
    for group, workers in groups.items():
        ids = [f"{group}-{n}" for n in range(len(workers))]
        table.replace(group, [
            Worker(id, group, worker.base_url, 4, token_of(id))
            for id, worker in zip(ids, workers, strict=True)
        ])  # fmt: skip
    return table


@contextmanager
def served(gateway: Gateway) -> Iterator[str]:
    """The gateway's address."""
    listener = listen("127.0.0.1", 0)
    server = server_for(gateway, 30.0, lambda _: None)

    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        watching = asyncio.create_task(watch(gateway._table))
        await server.serve(sockets=[listener])
        watching.cancel()

    thread = threading.Thread(target=uvloop.run, args=(serve(),), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loops[0].call_soon_threadsafe(server.end)
        thread.join(30)
