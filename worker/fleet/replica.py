"""The actors that Ray Serve runs for the fleet: one for each worker, and the gateways.

Only Ray's processes import this module. Ray starts, stops and checks the workers and says where
they are. Requests and tokens go between a gateway and a worker over plain HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.types import Message, Receive, Scope, Send

from worker.fleet.autoscaling import REQUESTS
from worker.fleet.gateway import Gateway
from worker.fleet.probing import watch
from worker.fleet.process import WorkerProcess
from worker.fleet.settings import Fleet, WorkerGroup
from worker.fleet.workers import Worker, WorkerTable

ASK_EVERY_SECONDS = 0.5
"""How often a gateway asks for the addresses of a group's workers."""
STOP_MARGIN_SECONDS = 5.0


class WorkerReplica:
    """Owns one worker from its spawn to its end; Serve's controller supervises this actor."""

    async def __init__(self, group: dict[str, Any]) -> None:  # type: ignore[misc]
        self._group = WorkerGroup.model_validate(group)
        self._n_slots = self._group.n_slots
        id = serve.get_replica_context().replica_id.unique_id
        self._id = f"{self._group.name}-{id}"
        address = ray.util.get_node_ip_address()
        loopback = address == "127.0.0.1"
        bind = ["--host", "127.0.0.1" if loopback else "0.0.0.0", "--advertise-host", address]
        self._address = address
        self._process = WorkerProcess(
            self._group.backend, [*self._group.arguments(), *bind, "--worker-id", self._id]
        )
        try:
            await self._process.until_ready()
        except BaseException:
            self._process.kill()
            raise

    def whereabouts(self) -> tuple[str, str, int]:
        """Id, uri and slots of the worker."""
        return self._id, f"http://{self._address}:{self._process.port}", self._n_slots

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls this once a second if the load decides the number of workers."""
        n_requests = await self._process.n_requests()
        return {} if n_requests is None else {REQUESTS: n_requests}

    async def check_health(self) -> None:
        await self._process.check()

    async def __del__(self) -> None:
        # Serve calls and awaits this when it removes the replica, after the gateways know of it.
        await self._process.stop(self._group.drain_seconds + STOP_MARGIN_SECONDS)


class GatewayReplica:
    """One gateway: an ASGI application that Serve's HTTP server calls."""

    def __init__(self) -> None:
        self._application = _Application()

    async def reconfigure(self, fleet: dict[str, Any]) -> None:
        """Serve calls this at the start and after each `up` that changes the fleet."""
        self._application.use(Fleet.model_validate(fleet))

    def __serve_build_asgi_app__(self) -> Any:
        return self._application


class _Application:
    """The gateway as an ASGI application for Serve, with the tasks that keep its table."""

    def __init__(self) -> None:
        self._table = WorkerTable()
        self._gateway: Gateway | None = None
        self._listening: dict[str, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None

    def use(self, fleet: Fleet) -> None:
        if self._gateway is None:
            self._gateway = Gateway(fleet, self._table)
            self._watching = asyncio.ensure_future(watch(self._table))
        self._gateway.use(fleet)
        names = {group.name for group in fleet.workers}
        for gone in self._listening.keys() - names:
            self._listening.pop(gone).cancel()
            self._table.replace(gone, [])
        for name in names - self._listening.keys():
            self._listening[name] = asyncio.ensure_future(_listen(name, self._table))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._gateway is None:
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Serve writes this header itself.
                kept = [each for each in message["headers"] if each[0] != b"x-request-id"]
                message = {**message, "headers": kept}
            await send(message)

        await self._gateway(scope, receive, answer)


async def _listen(group: str, table: WorkerTable) -> None:
    """Keep the table's entry for one group up to date until cancelled, by asking its replicas.

    Serve removes a replica from a handle's list before it stops the replica. (Serve notifies its
    routers at once, but with HAProxy in front an application's first deployment may not have a
    router of its own.)
    """
    handle = serve.get_deployment_handle("worker", group)
    while True:
        with contextlib.suppress(TimeoutError):
            try:
                answers = handle.broadcast("whereabouts")
                found = await answers.results_async(timeout_s=10, return_exceptions=True)
            except (RayServeException, ray.exceptions.RayError):
                found = []  # the group has no replica
            there = [each for each in found if isinstance(each, tuple)]
            table.replace(group, [Worker(id, group, uri, n_slots) for id, uri, n_slots in there])
        await asyncio.sleep(ASK_EVERY_SECONDS)
