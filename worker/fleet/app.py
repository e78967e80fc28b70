"""The Serve applications that `llorch-ray` deploys: one for each group of workers, one of gateways.

Only Ray's processes import this module, by the import paths in the configuration of `deploy`. Each
group is an application of its own, so a roll or a failure of one group leaves the rest running.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.schema import LoggingConfig

from worker.fleet.replica import STOP_MARGIN_SECONDS, GatewayReplica, WorkerReplica
from worker.fleet.settings import WorkerGroup

HEALTH_EVERY_SECONDS = 1.0
HEALTH_SECONDS = 10.0
GATEWAY_DRAIN_SECONDS = 600.0
"""A gateway that is being stopped gives its open streams this long to end."""
MAX_CONCURRENT = 10_000
"""High enough that Serve never queues a request: a full worker refuses requests itself."""
_HEAD = "node:__internal_head__"
"""The head node, where HAProxy runs. A gateway on another node would be lost with that node, and
its streams with it."""
_QUIET = LoggingConfig(enable_access_log=False)


def workers(args: dict[str, Any]) -> Application:
    """`args` holds a `WorkerGroup` as `group`, and `generation`: changing it rolls all replicas."""
    group = WorkerGroup.model_validate(args["group"])
    deployment = serve.deployment(WorkerReplica).options(
        name="worker",
        ray_actor_options=group.resources,
        max_ongoing_requests=MAX_CONCURRENT,
        health_check_period_s=HEALTH_EVERY_SECONDS,
        health_check_timeout_s=HEALTH_SECONDS,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=group.drain_seconds + 2 * STOP_MARGIN_SECONDS,
        max_constructor_retry_count=2,
        logging_config=_QUIET,
    )
    return deployment.bind(args["group"])


def gateways(args: dict[str, Any]) -> Application:
    """The gateways; Serve passes the fleet to each by `GatewayReplica.reconfigure`."""
    deployment = serve.deployment(serve.ingress()(GatewayReplica)).options(
        name="gateway",
        ray_actor_options={"num_cpus": 0, "resources": {_HEAD: 0.001}},
        max_ongoing_requests=MAX_CONCURRENT,
        health_check_period_s=HEALTH_EVERY_SECONDS,
        health_check_timeout_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=GATEWAY_DRAIN_SECONDS,
        logging_config=_QUIET,
    )
    return deployment.bind()
