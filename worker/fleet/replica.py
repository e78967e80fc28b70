"""The parts of the fleet that Ray Serve runs: an actor for each worker, and the gateways.

Only Ray's processes import this module, by the import paths in the configuration of `deploy`. Ray
starts, stops and checks the actors, and reports where they are. Clients' requests and tokens never
pass through Ray: a gateway listens on its own, and talks plain HTTP to the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import Any

import ray
import ray.serve._private.replica
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from worker.api.http.server import Server, server_for
from worker.errors import WorkerError
from worker.fleet.autoscaling import REQUESTS
from worker.fleet.gateway import Gateway
from worker.fleet.process import WorkerProcess
from worker.fleet.settings import GATEWAY_DRAIN_SECONDS, Fleet, WorkerGroup
from worker.fleet.workers import Worker, WorkerTable, watch, worker_id
from worker.observability import logs
from worker.sockets import listen, uri_of

ASK_EVERY_SECONDS = 0.5
"""How often a gateway fetches the addresses of a group's workers."""
KNOWING_SECONDS = 10.0
"""How long Serve waits until a gateway knows its workers, which may have changed by then."""
SLOW_READER_SECONDS = 30.0
"""How long a client may leave its answer unread."""


def _bind_to_own_address() -> str:
    """Make this actor's Serve port listen only on this node's address, which is returned. By
    default it listens on all addresses, and obeys anyone who can reach it."""
    host: str = ray.util.get_node_ip_address()
    module = ray.serve._private.replica
    add_port = module.add_port_to_grpc_server
    place = uri_of(host, 0).removeprefix("http://")
    module.add_port_to_grpc_server = lambda server, _: add_port(server, place)
    return host


def workers(args: dict[str, Any]) -> Application:
    """`args` has a `WorkerGroup` as `group`, and `generation`, whose change rolls all replicas."""
    return serve.deployment(WorkerReplica).options(name="worker").bind(args["group"])


def gateways(args: dict[str, Any]) -> Application:
    """`args` has a `Fleet` without its workers as `fleet`, and `generation`. Serve passes the
    workers to each gateway through `GatewayReplica.reconfigure`."""
    return serve.deployment(GatewayReplica).options(name="gateway").bind(args["fleet"])


class WorkerReplica:
    """Owns one worker from its start to its end; Serve's controller supervises this actor."""

    async def __init__(self, group: dict[str, Any]) -> None:  # type: ignore[misc]
        self._group = WorkerGroup.model_validate(group)
        settings = self._group.worker
        id = serve.get_replica_context().replica_id.unique_id
        host = _bind_to_own_address()
        # Created here and sent only to the gateways; it is in no configuration, log or file.
        self._token = secrets.token_urlsafe(32)
        self._id = worker_id(self._group.name, id)
        ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        self._process = WorkerProcess(
            self._group.backend, host, self._token,
            [*self._group.arguments(ids), "--worker-id", self._id], settings.log_level,
        )  # fmt: skip
        try:
            await self._process.until_ready()
        except BaseException:
            self._process.kill()
            raise

    def whereabouts(self) -> Worker:
        """The worker as a new entry for a gateway's table."""
        uri = uri_of(*self._process.address)
        return Worker(self._id, self._group.name, uri, self._group.worker.engine.slots, self._token)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls this once a second if the load decides the number of workers."""
        n_requests = await self._process.n_requests()
        return {} if n_requests is None else {REQUESTS: n_requests}

    async def check_health(self) -> None:
        await self._process.check()

    async def __del__(self) -> None:
        # Serve awaits this when it removes the replica, after the gateways have been informed.
        await self._process.stop(self._group.worker.drain_timeout)


class GatewayReplica:
    """One gateway and its HTTP server. Several share the fleet's port, and the kernel distributes
    the connections. This lets a new one listen before it replaces an old one."""

    def __init__(self, fleet: dict[str, Any]) -> None:
        logs.configure("info", "json", "gateway")  # Ray keeps this process's output
        _bind_to_own_address()
        self._fleet = fleet
        self._table = WorkerTable()
        self._gateway = Gateway(self._table)
        self._groups: list[dict[str, Any]] = []
        self._server: Server | None = None
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def reconfigure(self, given: dict[str, Any]) -> None:
        """Serve calls this at the start and after each command that changes `given`, and considers
        the gateway ready when it returns. `listed` has the workers that the command has seen."""
        fleet = Fleet.model_validate({**self._fleet, "workers": given["workers"]})
        if given["workers"] != self._groups:
            self._gateway.use(fleet)
            self._groups = given["workers"]
        names = {group.name for group in fleet.workers}
        for gone in self._asking.keys() - names:
            self._asking.pop(gone).cancel()
            self._table.replace(gone, [])
        for name in names - self._asking.keys():
            self._asking[name] = asyncio.create_task(_ask(name, self._table))
        if self._server is None:
            # So that new clients find the same workers as at the previous gateway.
            await _until(lambda: names <= self._table.groups)
            self._serve(fleet)
        elif (listed := given.get("listed")) is not None:
            await _until(lambda: {worker.id for worker in self._table.workers()} == set(listed))

    def _serve(self, fleet: Fleet) -> None:
        listener = listen(fleet.host, fleet.port, shared=True)
        # Each connection may need a second one, to a worker.
        server = server_for(self._gateway, SLOW_READER_SECONDS, lambda _: None, files_each=2)
        server.config.ssl_certfile = fleet.ssl_certfile
        server.config.ssl_keyfile = fleet.ssl_keyfile
        server.config.timeout_graceful_shutdown = GATEWAY_DRAIN_SECONDS
        server.config.load()  # reads the certificate; raises if that is wrong
        self._server = server
        self._serving = asyncio.create_task(server.serve(sockets=[listener]))
        self._watching = asyncio.create_task(watch(self._table))

    async def check_health(self) -> None:
        if self._serving.done():
            raise WorkerError("the gateway's HTTP server has ended")
        if any(task.done() for task in (self._watching, *self._asking.values())):
            raise WorkerError("the gateway has stopped watching its workers")

    async def __del__(self) -> None:
        if self._server is not None:
            self._server.end()
            await asyncio.wait({self._serving})


async def _until(holds: Callable[[], bool]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KNOWING_SECONDS):
            while not holds():
                await asyncio.sleep(0.05)


async def _ask(group: str, table: WorkerTable) -> None:
    """Keep the table's workers of one group up to date by asking its replicas, until cancelled.

    Serve removes a replica from a handle's list before it stops the replica.
    """
    # A group that `up` adds may not exist yet.
    handle = serve.get_deployment_handle("worker", group, _check_exists=False)
    while True:
        with contextlib.suppress(TimeoutError):
            try:
                answers = handle.broadcast("whereabouts")
                found = await answers.results_async(timeout_s=10, return_exceptions=True)
            except (RayServeException, ray.exceptions.RayError):
                found = []  # the group has no replica
            table.replace(group, [each for each in found if isinstance(each, Worker)])
        await asyncio.sleep(ASK_EVERY_SECONDS)
