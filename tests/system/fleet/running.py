"""A fleet on real Ray nodes for the long tests: start, inspect, damage, stop."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests import ROOT
from tests.support.ports import free_port
from tests.system.fleet.load import get
from worker.fleet.cluster import LOCAL_ENVIRONMENT

ROUNDS = int(os.environ.get("ROUNDS") or 2)
MARK = "FLEET_TEST"
"""A variable that marks this test's processes."""
PATIENCE_SECONDS = 180.0
"""Timeout for anything on a busy machine; the figures are printed and not limited by it."""


@dataclass
class Running:
    """The cluster and the fleet on it."""

    environment: dict[str, str]
    folder: Path
    port: int
    nodes: subprocess.Popen[str] | None = None
    """The process `tests.system.fleet.nodes`, if it runs the cluster."""

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `llorch-ray …` to its end."""
        return self.command_in({}, *arguments)

    def command_in(
        self, environment: dict[str, str], *arguments: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `llorch-ray …` with these additional variables."""
        line = [sys.executable, "-m", "worker.fleet.command", *arguments]
        return subprocess.run(
            line, cwd=ROOT, env={**self.environment, **environment},
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip

    def up(self, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = self.folder / "fleet.toml"
        path.write_text(f"port = {self.port}\n{text}")
        return self.command_in(environment, "up", str(path))

    def processes(self) -> list[psutil.Process]:
        """Return the running processes of nodes and workers."""
        return [
            process
            for process in psutil.process_iter(["cmdline", "environ"])
            if (process.info["environ"] or {}).get(MARK) == str(self.folder)
        ]

    def children(self) -> dict[str, psutil.Process]:
        """Return the workers' processes, by their ids."""
        found = {}
        for process in self.processes():
            line = process.info["cmdline"] or []
            if "worker.fleet.child" in line:
                found[line[line.index("--worker-id") + 1]] = process
        return found

    def token_of(self, worker_id: str) -> str:
        """Return the token that the gateway uses for a worker."""
        return self.children()[worker_id].environ()["LLORCH_WORKER_TOKEN"]

    def actor(self, worker_id: str) -> psutil.Process:
        """Return the process that owns a worker."""
        owner = self.children()[worker_id].parent()
        assert owner is not None
        return owner

    def add_node(self) -> None:
        """Add a machine with one device to the cluster; returns before it is ready."""
        assert self.nodes is not None and self.nodes.stdin is not None
        self.nodes.stdin.write("add\n")
        self.nodes.stdin.flush()

    async def restored(self, replicas: int = 3, **settings: Any) -> None:
        """Restore the fleet to its file, whatever an earlier test left."""
        done = await asyncio.to_thread(self.up, file(replicas, **settings))
        assert done.returncode == 0, done.stdout + done.stderr
        await self.until(has(replicas))

    async def workers(self) -> list[dict[str, Any]]:
        health = await get(self.uri, "/health")
        workers: list[dict[str, Any]] = (health or {}).get("workers", [])
        return workers

    async def until(self, what: Callable[[list[dict[str, Any]]], bool]) -> float:
        """Return the seconds until the gateway's view of the workers fulfils the condition."""
        began = time.monotonic()
        while not what(await self.workers()):
            assert time.monotonic() - began < PATIENCE_SECONDS, await self.workers()
            await asyncio.sleep(0.1)
        return time.monotonic() - began


FLEET = """
[[workers]]
name = "tiny"
device = "llorch_device"
replicas = {replicas}
surge = {surge}

[workers.settings]
threads = 1
slots = {slots}
max_queued_requests = {queue}
drain_timeout = 20
page = false
"""


def file(
    replicas: int | str = 3, slots: int = 4, queue: int = 256, surge: bool = False, more: str = ""
) -> str:
    """Make a fleet file of one group; `more` is appended."""
    settings = {"replicas": replicas, "slots": slots, "queue": queue, "surge": str(surge).lower()}
    return FLEET.format(**settings) + more


def has(n_workers: int) -> Callable[[list[dict[str, Any]]], bool]:
    """A condition: this many workers, all healthy."""
    return lambda workers: len(workers) == n_workers and all(each["well"] for each in workers)


def has_gone(process: psutil.Process, seconds: float = PATIENCE_SECONDS) -> bool:
    """Return whether a process has ended, or ends within that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        # A process that nobody waits for stays a zombie if the init process does not reap it.
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@contextmanager
def cluster(folder: Path) -> Iterator[Running]:
    """Real nodes on this machine; they and their processes are gone afterwards."""
    environment = {
        **os.environ, **LOCAL_ENVIRONMENT,
        "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache"),
    }  # fmt: skip
    # Marks the processes: Ray passes its environment to everything it starts.
    marked = {**environment, MARK: str(folder)}
    log = (folder / "nodes.log").open("w")
    nodes = subprocess.Popen(
        [sys.executable, "-m", "tests.system.fleet.nodes"],
        cwd=ROOT, env=marked, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
    )  # fmt: skip
    assert nodes.stdin is not None and nodes.stdout is not None
    try:
        line = nodes.stdout.readline()
        assert line, (folder / "nodes.log").read_text()[-3000:]
        environment["RAY_DASHBOARD_ADDRESS"] = json.loads(line)["dashboard"]
        yield Running(environment, folder, free_port(), nodes)
    finally:
        nodes.stdin.close()
        nodes.wait(120)
        nodes.stdout.close()
        log.close()


@contextmanager
def on_this_machine(folder: Path, text: str, **environment: str) -> Iterator[Running]:
    """Run this file's fleet on a cluster that `llorch-ray up` starts itself."""
    inherited = {
        **os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache"),
        MARK: str(folder),
    }  # fmt: skip
    inherited.pop("RAY_DASHBOARD_ADDRESS", None)
    running = Running(inherited | environment, folder, free_port())
    try:
        done = running.up(text)
        assert done.returncode == 0, done.stdout + done.stderr
        yield running
    finally:
        running.command("down")
        for process in running.processes():
            process.kill()
