"""What `llorch-ray` deploys: an application of workers for each group, and one of gateways.

Imported in Ray's processes only, by the paths that `deploy` writes. Each group is an application of
its own, so that one is rolled, or fails, without the others and without the gateways.
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
"""Streams that a gateway has may end before it goes."""
MAX_CONCURRENT = 10_000
"""Of a gateway's requests: the workers say when they are full, not Serve."""
_HEAD = "node:__internal_head__"
"""The node that HAProxy is on; a gateway on another would go with it, and its streams too."""
_QUIET = LoggingConfig(enable_access_log=False)


def workers(args: dict[str, Any]) -> Application:
    """`args`: `group`, a `WorkerGroup`; `generation`, whose change rolls all replicas."""
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
    """The gateways; which fleet they serve comes by `reconfigure`."""
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
