"""The command `llorch-ray`: runs a fleet of workers that one file describes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from worker.api.http.gate import is_loopback
from worker.arguments import Parser, add_command, whole_number
from worker.errors import ConfigError, ModelError, WorkerError, escaped
from worker.fleet import deploy
from worker.fleet.cluster import (
    START_SECONDS,
    TOKEN_VARIABLE,
    Cluster,
    LocalNode,
    NoCluster,
    require_ray,
)
from worker.fleet.settings import MAX_REPLICAS, Fleet, WorkerGroup, load
from worker.installation import own_version

POLL_SECONDS = 0.5
START_ATTEMPTS = 3
"""On a busy machine, a part of Ray that starts too slowly makes the rest of it exit."""
PLACING_SECONDS = 10.0
"""A worker that Ray has not placed after this time waits for a device that another one uses."""


def run(argv: list[str]) -> int:
    """Run one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        require_ray()
        with contextlib.closing(Cluster(os.environ)) as cluster:
            act: Callable[[Cluster, argparse.Namespace], None] = arguments.act
            act(cluster, arguments)
    except WorkerError as error:
        lines = map(escaped, error.message.split("\n"))  # Ray's message may be a whole traceback
        with contextlib.suppress(OSError):  # without a reader, the exit code still reports it
            print("llorch-ray:", "\n    ".join(lines), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="llorch-ray",
        description="Serve with several workers, on one machine or many, through Ray Serve.",
        epilog="exit codes: 0 done, 1 Ray refuses or does not run, 2 usage, the file, or Ray is "
        "not installed, 3 the workers do not start. Set RAY_DASHBOARD_ADDRESS to use a cluster "
        "other than this machine's.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {own_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = add_command(commands, "up", "start the fleet of a file, or change the running one to it")
    up.add_argument("file", type=Path, metavar="FILE", help="a TOML file of workers")
    up.set_defaults(act=_up)
    status = add_command(commands, "status", "show the workers and their states")
    status.add_argument("--json", action="store_true", help="as JSON")
    status.set_defaults(act=_status)
    scale = add_command(
        commands, "scale", "fix the number of workers until the next `up`, whatever the load"
    )
    scale.set_defaults(act=_scale)
    roll = add_command(commands, "roll", "replace the workers of a group one after another")
    roll.set_defaults(act=_roll)
    for command in (scale, roll):
        command.add_argument(
            "group",
            nargs="?",
            metavar="NAME",
            help="the group's name in the file, needed if there are several",
        )
    text = "the number of workers"
    scale.add_argument("count", type=whole_number(MAX_REPLICAS), metavar="N", help=text)
    down = add_command(commands, "down", "drain and end all workers, and Ray if `up` started it")
    down.set_defaults(act=_down)
    return parser


# --- the commands ------------------------------------------------------------------------


def _up(cluster: Cluster, arguments: argparse.Namespace) -> None:
    fleet = load(arguments.file)
    details = _cluster_details(cluster, fleet)
    running = deploy.running_config(details)
    failed = [state.name for state in deploy.states(details) if state.has_failed]
    fleet = _protected(fleet, running)
    config = deploy.configuration(fleet, running, failed)
    if (both := deploy.with_leaving(config, running, failed)) is not None:
        _deploy(cluster, both, unless_for_a_device=True)
    _deploy(cluster, config)
    print(f"The fleet is up: {fleet.uri}")


def _status(cluster: Cluster, arguments: argparse.Namespace) -> None:
    details = cluster.details()
    _running_fleet(details)
    states = deploy.states(details)
    if arguments.json:
        print(json.dumps([asdict(state) for state in states]))
        return
    for state in states:
        print(f"{state.name:24} {state.status:14} {state.running} of {state.wanted} running")
        for replica in state.replicas:
            print(f"    {replica.id:20} {replica.state:14} {replica.node or '-'}")
        if state.message and not state.is_up:
            print(f"    {_short(state.message)}")


def _scale(cluster: Cluster, arguments: argparse.Namespace) -> None:
    config = _running_fleet(cluster.details())
    _deploy(cluster, deploy.scaled(config, _group(config, arguments), arguments.count))


def _roll(cluster: Cluster, arguments: argparse.Namespace) -> None:
    config = _running_fleet(cluster.details())
    group = _group(config, arguments)
    _deploy(cluster, deploy.rolled(config, group))
    print(f"All workers of {group} are new.")


def _down(cluster: Cluster, arguments: argparse.Namespace) -> None:
    """End the fleet, and also this machine's cluster unless another is named."""
    node = LocalNode()
    try:
        if deploy.running_config(cluster.details()) is not None:
            cluster.delete()
    except NoCluster:
        if cluster.is_named or not node.stop():
            raise
    if cluster.is_named:
        node.forget_token()
    else:
        node.stop()
    print("The fleet is down.")


# --- their parts -------------------------------------------------------------------------


def _cluster_details(cluster: Cluster, fleet: Fleet) -> dict[str, object]:
    """Serve's report; starts a cluster on this machine first if there is none.

    A cluster that `RAY_DASHBOARD_ADDRESS` names is never started here.
    """
    try:
        return cluster.details()
    except NoCluster:
        if cluster.is_named:
            raise
    node = LocalNode()
    deadline = time.monotonic() + START_SECONDS
    with node.locked():
        for _ in range(START_ATTEMPTS):
            if node.pid is None:
                print("Starting Ray on this machine…", flush=True)
                node.start(json.dumps(_devices(fleet.workers)))
            while node.pid is not None:
                try:
                    return cluster.details()
                except WorkerError as error:
                    if time.monotonic() > deadline:
                        raise WorkerError(f"Ray does not start: {error.message}") from None
                time.sleep(POLL_SECONDS)
    raise WorkerError(f"Ray does not start: {node.log.read_text(errors='replace').strip()[-1500:]}")


def _protected(fleet: Fleet, running: deploy.Config | None) -> Fleet:
    """The fleet with the token and keys that its clients must send. They come from its file, or the
    token from the environment; otherwise those of the running fleet are kept."""
    if fleet.token_file is None and (token := os.environ.get(TOKEN_VARIABLE)):
        fleet = fleet.model_copy(update={"token_file": str(LocalNode().keep_token(token))})
    for name, file in deploy.key_files_of(running).items():
        if getattr(fleet, name) is None:
            print(f"The fleet keeps its {name}, {file}, until `llorch-ray down`.")
            fleet = fleet.model_copy(update={name: file})
    if fleet.is_open and not is_loopback(fleet.host):
        print(
            f"llorch-ray: without {TOKEN_VARIABLE}, token_file or api_key_file, anyone who "
            f"reaches {fleet.uri} can use the models.",
            file=sys.stderr,
        )
    return fleet


def _group(config: deploy.Config, arguments: argparse.Namespace) -> str:
    names = deploy.names_of(config)
    if arguments.group is None and len(names) > 1:
        raise ConfigError(f"The fleet has {', '.join(names)}; name one of them.")
    return str(names[0] if arguments.group is None else arguments.group)


def _devices(groups: Iterable[WorkerGroup]) -> Counter[str]:
    """The custom Ray resources to declare for this machine: one for each replica that needs one.

    Ray counts CPUs and GPUs itself.
    """
    counted: Counter[str] = Counter()
    for group in groups:
        if group.device not in (None, "GPU", "CPU"):
            counted[group.device] += group.max_workers
    return counted


def _deploy(cluster: Cluster, config: deploy.Config, *, unless_for_a_device: bool = False) -> None:
    """Deploy, and wait until all applications run and the gateways list all workers. Prints each
    change of an application's state.

    With `unless_for_a_device`, stop waiting once all that do not run only wait for a device.
    Raises `ModelError` with the worker's reason if an application does not start, and `WorkerError`
    if another command has changed the fleet in the meantime.
    """
    shown: dict[str, tuple[str, int]] = {}
    in_want_since = time.monotonic()
    is_listed = False
    cluster.deploy(config)
    while True:
        details = cluster.details()
        if deploy.args_of(deploy.running_config(details)) != deploy.args_of(config):
            raise WorkerError("Another command has changed the fleet in the meantime, or ended it.")
        states = deploy.states(details)
        for state in states:
            now = (state.status, state.running)
            if shown.get(state.name) != now:
                shown[state.name] = now
                counts = f"{state.running} of {state.wanted}"
                print(f"{state.name}: {state.status.lower()}, {counts} running", flush=True)
            if state.has_failed:
                raise ModelError(f"{state.name} does not start: {_short(state.message)}")
        left = [state for state in states if not state.is_up]
        if not left:
            if is_listed:
                return
            is_listed = True
            cluster.deploy(deploy.with_listed(config, states))
        elif not all(state.waits_for_a_device for state in left):
            in_want_since = time.monotonic()
        elif unless_for_a_device and time.monotonic() - in_want_since > PLACING_SECONDS:
            return
        time.sleep(POLL_SECONDS)


def _running_fleet(details: Mapping[str, object]) -> deploy.Config:
    if (config := deploy.running_config(details)) is None:
        raise ConfigError("No fleet runs on this cluster; start one with `llorch-ray up FILE`.")
    return config


def _short(message: str) -> str:
    """The reason at the end of Serve's message, which can contain a whole traceback."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    for line in reversed(lines):
        if found := re.search(r"worker\.errors\.\w+: (.*)", line):
            return found[1]
    return lines[-1] if lines else "Ray gives no reason"


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
