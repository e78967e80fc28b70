"""Translates between the fleet and the JSON of Serve's REST interface, in both directions.

Serve compares each application with the running one. Changed arguments replace all replicas; a
changed number of replicas starts or stops some. Pure functions.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from worker.errors import ConfigError
from worker.fleet.settings import GATEWAY_DRAIN_SECONDS, KEY_FILES, Fleet, Scaling, WorkerGroup
from worker.fleet.workers import worker_id

GATEWAY = "gateway"
STOP_MARGIN_SECONDS = 10.0
"""Time for the exit of a worker or gateway after its drain."""
_COMMON = {
    "max_ongoing_requests": 10_000,  # Serve queues nothing: a full worker refuses work itself
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 10.0,
    "graceful_shutdown_wait_loop_s": 0.2,
    "logging_config": {"enable_access_log": False},
}
REPORT_SECONDS = 1.0
"""How often a replica reports its load. With Serve's default of 10, full load scales down."""
LOOK_BACK_SECONDS = 4.0
"""A replica's load is the mean over this time."""
TARGET_OF_SLOTS = 0.8
"""The default target of a worker's load, as a share of its slots."""
Config = dict[str, Any]


def configuration(
    fleet: Fleet, running: Config | None = None, failed: Container[str] = ()
) -> Config:
    """The configuration that changes the `running` one to the fleet.

    It contains no secret, because Ray stores and logs it in clear text. Serve does not restart an
    unchanged application, even one that has `failed`; a new generation number makes it do so.
    """
    known = {app["name"]: app for app in (running or {}).get("applications", [])}

    def application(name: str, builder: str, args: Config, deployment: Config) -> Config:
        before: int = known.get(name, {}).get("args", {}).get("generation", 0)
        return {
            "name": name,
            "route_prefix": None,
            "import_path": f"worker.fleet.replica:{builder}",
            "args": {**args, "generation": before + (name in failed)},
            "deployments": [{**_COMMON, **deployment}],
        }

    counts = {"replicas", "scaling", "surge"}  # changing these must not replace workers
    groups = {each.name: each.model_dump(mode="json", exclude=counts) for each in fleet.workers}
    gateway = {
        "name": GATEWAY,
        "num_replicas": fleet.gateways,
        # On the head node, because clients use one address.
        "ray_actor_options": {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
        "graceful_shutdown_timeout_s": GATEWAY_DRAIN_SECONDS + STOP_MARGIN_SECONDS,
        "max_surge_percent": 100,  # the old ones stay if a new one does not start
        "user_config": {"workers": list(groups.values())},
    }
    place = {"fleet": fleet.model_dump(mode="json", exclude={"workers", "gateways"})}
    return {
        # Serve's own proxy would listen on other ports, without TLS.
        "proxy_location": "Disabled",
        "applications": [
            *(
                application(
                    group.name, "workers", {"group": groups[group.name]}, _deployment(group)
                )
                for group in fleet.workers
            ),
            application(GATEWAY, "gateways", place, gateway),
        ],
    }


def with_leaving(
    config: Config, running: Config | None, failed: Container[str] = ()
) -> Config | None:
    """The configuration plus the running groups that it drops, so that they serve until the new
    ones do; `None` if there are none, apart from those that have `failed`."""
    stays = (*names_of(config), GATEWAY)
    before = (running or {}).get("applications", [])
    leaving = [app for app in before if app["name"] not in stays and app["name"] not in failed]
    if not leaving:
        return None
    *groups, gateway = config["applications"]
    (deployment,) = gateway["deployments"]
    # If an old and a new group share a model name, it refers to the old one while that exists.
    served = [*(app["args"]["group"] for app in leaving), *deployment["user_config"]["workers"]]
    gateway = {**gateway, "deployments": [{**deployment, "user_config": {"workers": served}}]}
    return {**config, "applications": [*groups, *leaving, gateway]}


def args_of(config: Config | None) -> dict[str, dict[str, Any]]:
    return {app["name"]: app["args"] for app in (config or {}).get("applications", [])}


def key_files_of(config: Config | None) -> dict[str, str]:
    """The files of a running fleet's token and keys, by the settings that name them."""
    fleet = args_of(config).get(GATEWAY, {}).get("fleet", {})
    return {name: fleet[name] for name in KEY_FILES if fleet.get(name) is not None}


def running_config(details: Mapping[str, Any]) -> Config | None:
    """The deployed configuration, read from Serve's report; `None` if no fleet runs.

    Raises `ConfigError` if Serve runs other applications, which deploying a fleet would end.
    """
    apps = details.get("applications", {})
    others = [name for name, app in apps.items() if not _is_ours(app)]
    if others:
        raise ConfigError(
            f"The cluster also serves {', '.join(others)}, which a fleet would end; "
            "give the fleet its own cluster."
        )
    if GATEWAY not in apps:
        return None
    configs = [app["deployed_app_config"] for app in apps.values() if app["deployed_app_config"]]
    return {"proxy_location": "Disabled", "applications": configs}


def _is_ours(app: Mapping[str, Any]) -> bool:
    config = app.get("deployed_app_config")
    if not config:  # it is being deleted, or was deployed without a configuration
        return bool(app.get("status") == "DELETING")
    return str(config.get("import_path")).startswith("worker.fleet.")


def names_of(config: Config) -> list[str]:
    return [app["name"] for app in config["applications"] if app["name"] != GATEWAY]


def scaled(config: Config, name: str, count: int) -> Config:
    """The configuration with a fixed number of workers in the group `name`."""
    changed, app = _copied(config, name)
    for deployment in app["deployments"]:
        deployment.pop("autoscaling_config", None)
        deployment["num_replicas"] = count
    return changed


def rolled(config: Config, name: str) -> Config:
    """A configuration that makes Serve replace all workers of the group, one after another."""
    changed, app = _copied(config, name)
    app["args"]["generation"] = app["args"].get("generation", 0) + 1
    return changed


def with_listed(config: Config, states: Iterable[GroupState]) -> Config:
    """A configuration with which a gateway is ready once it lists the workers that run now."""
    changed = deepcopy(config)
    (gateway,) = (app for app in changed["applications"] if app["name"] == GATEWAY)
    gateway["deployments"][0]["user_config"]["listed"] = [
        worker_id(state.name, replica.id)
        for state in states
        if state.name != GATEWAY
        for replica in state.replicas
        if replica.state == "RUNNING"
    ]
    return changed


def _copied(config: Config, name: str) -> tuple[Config, Config]:
    """A copy of the configuration, and the group's application in it."""
    if name not in names_of(config):
        there = ", ".join(names_of(config))
        raise ConfigError(f"The fleet has no workers named {name!r}; it has {there}.")
    copied = deepcopy(config)
    return copied, next(app for app in copied["applications"] if app["name"] == name)


def _deployment(group: WorkerGroup) -> Config:
    """Serve's settings for the number of a group's workers and for their replacement."""
    # `surge` as 1 percent, rounded up to whole workers: 1 for up to 100 workers.
    settings: Config = {
        "name": "worker",
        "max_surge_percent": int(group.surge),
        "ray_actor_options": group.resources,
        "graceful_shutdown_timeout_s": group.worker.drain_timeout + STOP_MARGIN_SECONDS,
    }
    if isinstance(group.replicas, int):
        return {**settings, "num_replicas": group.replicas}
    least, most = group.replicas
    scaling = group.scaling or Scaling()
    target = scaling.target or TARGET_OF_SLOTS * group.worker.engine.slots
    return {
        **settings,
        "autoscaling_config": {
            "min_replicas": least,
            "max_replicas": most,
            "upscale_delay_s": scaling.up_delay,
            "downscale_delay_s": scaling.down_delay,
            "metrics_interval_s": REPORT_SECONDS,
            "look_back_period_s": LOOK_BACK_SECONDS,
            "policy": {
                "policy_function": "worker.fleet.autoscaling:RequestsPerWorker",
                "policy_kwargs": {"target": target},
            },
        },
    }


@dataclass(frozen=True, slots=True)
class ReplicaState:
    id: str
    state: str
    node: str | None
    """The address of its node; `None` until it is placed."""


@dataclass(frozen=True, slots=True)
class GroupState:
    """One group, as `status --json` shows it."""

    name: str
    status: str
    message: str
    running: int
    wanted: int
    replicas: list[ReplicaState]
    waits_for_a_device: bool
    """Whether all replicas that do not run are not placed, and need a resource that Ray counts.
    Replicas without such a need are only slow to start."""

    @property
    def is_up(self) -> bool:
        return self.status == "RUNNING"

    @property
    def has_failed(self) -> bool:
        return self.status == "DEPLOY_FAILED"


def states(details: Mapping[str, Any]) -> list[GroupState]:
    return [_state(name, app) for name, app in details.get("applications", {}).items()]


def _state(name: str, app: Mapping[str, Any]) -> GroupState:
    deployments: Iterable[Mapping[str, Any]] = app["deployments"].values()
    found = [each for deployment in deployments for each in deployment["replicas"]]
    messages = [app.get("message") or "", *(each.get("message") or "" for each in deployments)]
    replicas = [
        ReplicaState(each["replica_id"], each["state"], each.get("node_ip") or None)
        for each in found
    ]
    waiting = [each for each in replicas if each.state != "RUNNING"]
    (asked,) = (app.get("deployed_app_config") or {}).get("deployments") or [{}]
    needs = asked.get("ray_actor_options", {"num_cpus": 1})
    return GroupState(
        name=name,
        status=str(app["status"]),
        message=max(messages, key=len),
        running=sum(each["state"] == "RUNNING" for each in found),
        wanted=sum(int(each.get("target_num_replicas") or 0) for each in deployments),
        replicas=replicas,
        waits_for_a_device=bool(waiting)
        and any(needs.values())
        and all(each.node is None for each in waiting),
    )
