"""The command `llorch-ray`: runs a fleet of workers that one file describes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from worker.errors import ConfigError, ModelError, WorkerError
from worker.fleet import deploy
from worker.fleet.cluster import START_SECONDS, Cluster, LocalNode, NoCluster, require_ray
from worker.fleet.settings import MAX_REPLICAS, Fleet, WorkerGroup, load

POLL_SECONDS = 0.5


def main() -> NoReturn:
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command to its end; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        require_ray()
        with contextlib.closing(Cluster(os.environ)) as cluster:
            act: Callable[[Cluster, argparse.Namespace], None] = arguments.act
            act(cluster, arguments)
    except WorkerError as error:
        print(f"llorch-ray: {error.message}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llorch-ray",
        description="Serve with several workers, on one machine or many, through Ray Serve.",
        epilog="exit codes: 0 done, 1 Ray refuses or is not there, 2 usage or file, 3 the workers "
        "do not start. RAY_DASHBOARD_ADDRESS names a cluster other than this machine's.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="start what the file describes, or change what runs to it")
    up.add_argument("file", type=Path, metavar="FILE", help="a TOML file of workers")
    up.set_defaults(act=_up)
    status = commands.add_parser("status", help="show the workers and their states")
    status.add_argument("--json", action="store_true", help="as JSON")
    status.set_defaults(act=_status)
    scale = commands.add_parser(
        "scale", help="run so many workers, until the next `up`, also where the load decided"
    )
    scale.add_argument("count", type=_count, metavar="N")
    scale.add_argument("--model", metavar="NAME", help="of this name; needed if there are several")
    scale.set_defaults(act=_scale)
    roll = commands.add_parser("roll", help="replace the workers of a model, one after another")
    roll.add_argument("model", metavar="MODEL", help="their name in the file")
    roll.set_defaults(act=_roll)
    down = commands.add_parser("down", help="drain and end all workers; the local cluster too")
    down.set_defaults(act=_down)
    return parser


# --- the commands ------------------------------------------------------------------------


def _up(cluster: Cluster, arguments: argparse.Namespace) -> None:
    fleet = load(arguments.file)
    details = _cluster_details(cluster, fleet)
    running = deploy.running_config(details)
    failed = [state.name for state in deploy.states(details) if state.has_failed]
    cluster.deploy(deploy.configuration(fleet, os.environ, running, failed))
    _wait(cluster)
    host = f"[{fleet.host}]" if ":" in fleet.host else fleet.host
    print(f"The fleet is up: http://{host}:{fleet.port}")


def _status(cluster: Cluster, arguments: argparse.Namespace) -> None:
    _running_fleet(cluster)
    states = deploy.states(cluster.details())
    if arguments.json:
        print(json.dumps([asdict(state) for state in states]))
        return
    for state in states:
        print(f"{state.name:24} {state.status:14} {state.running} of {state.wanted} running")
        for replica in state.replicas:
            print(f"    {replica.id:20} {replica.state:14} {replica.node}")
        if state.message and not state.is_up:
            print(f"    {_short(state.message)}")


def _scale(cluster: Cluster, arguments: argparse.Namespace) -> None:
    config = _running_fleet(cluster)
    names = deploy.names_of(config)
    name = arguments.model or names[0]
    if arguments.model is None and len(names) > 1:
        raise ConfigError(f"The fleet has {', '.join(names)}; --model says which to scale.")
    cluster.deploy(deploy.scaled(config, name, arguments.count))
    _wait(cluster)


def _roll(cluster: Cluster, arguments: argparse.Namespace) -> None:
    cluster.deploy(deploy.rolled(_running_fleet(cluster), arguments.model))
    _wait(cluster)
    print(f"All workers of {arguments.model} are new.")


def _down(cluster: Cluster, arguments: argparse.Namespace) -> None:
    try:
        if deploy.running_config(cluster.details()) is not None:
            cluster.delete()
    except NoCluster:
        if not LocalNode().stop():
            raise
    else:
        LocalNode().stop()
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
    if node.pid is None:
        print("Starting Ray on this machine…", flush=True)
        node.start(json.dumps(_devices(fleet.workers)))
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return cluster.details()
        except WorkerError as error:
            if node.pid is None or time.monotonic() > deadline:
                log = node.log.read_text(errors="replace").strip()[-1500:]
                raise WorkerError(f"Ray does not start: {log or error.message}") from None
        time.sleep(POLL_SECONDS)


def _devices(groups: Iterable[WorkerGroup]) -> Counter[str]:
    """Custom Ray resources of this machine, one for each replica in the file that needs one.

    Ray counts CPUs and GPUs itself.
    """
    counted: Counter[str] = Counter()
    for group in groups:
        if group.device not in (None, "GPU", "CPU"):
            counted[group.device] += group.max_workers
    return counted


def _wait(cluster: Cluster) -> None:
    """Wait until all applications run; prints each change of their states.

    Raises `ModelError` if an application does not start; its message carries the worker's reason.
    """
    shown: dict[str, tuple[str, int]] = {}
    while True:
        states = deploy.states(cluster.details())
        for state in states:
            now = (state.status, state.running)
            if shown.get(state.name) != now:
                shown[state.name] = now
                counts = f"{state.running} of {state.wanted}"
                print(f"{state.name}: {state.status.lower()}, {counts} running", flush=True)
            if state.has_failed:
                raise ModelError(f"{state.name} does not start: {_short(state.message)}")
        if states and all(state.is_up for state in states):
            return
        time.sleep(POLL_SECONDS)


def _running_fleet(cluster: Cluster) -> deploy.Config:
    config = deploy.running_config(cluster.details())
    if config is None:
        raise ConfigError("No fleet runs on this cluster; `llorch-ray up FILE` starts one.")
    return config


def _count(text: str) -> int:
    """Parse a number of workers, for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_REPLICAS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {MAX_REPLICAS}")
    return int(text)


def _short(message: str) -> str:
    """The reason at the end of a message of Serve, which can hold a whole traceback."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    for line in reversed(lines):
        if "WorkerError: " in line:
            return line.partition("WorkerError: ")[2]
    return lines[-1] if lines else "Ray says no more than that"


if __name__ == "__main__":
    main()
