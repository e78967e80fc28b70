"""Runs a worker's image as its users do: `podman run` with flags, then HTTP.

podman is told to be modest (see `ENGINE`), so that it also runs where a machine is itself a guest.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from tests.support import sse
from tests.support.ports import free_port

ENGINE = """\
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
"""


@cache
def environment() -> dict[str, str]:
    """podman's settings for these tests alone."""
    engine = ENGINE + ('runtime = "runc"\n' if shutil.which("runc") else "")
    settings = Path(tempfile.gettempdir(), f"llorch-podman-{os.getuid()}.conf")
    settings.write_text(engine)
    return {
        **os.environ,
        "CONTAINERS_CONF": str(settings),
        "STORAGE_DRIVER": "vfs",
        "BUILDAH_ISOLATION": "chroot",
    }


def podman(*arguments: str, timeout_s: float = 120, check: bool = True) -> str:
    done = subprocess.run(
        ["podman", *arguments], env=environment(), capture_output=True, text=True, timeout=timeout_s
    )
    assert not check or done.returncode == 0, f"podman {arguments}: {done.stderr[-3000:]}"
    return done.stdout.strip()


@dataclass(slots=True)
class Container:
    """A running worker, reached through its published port."""

    name: str
    port: int
    started: float

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.base_url + path, timeout=10, trust_env=False)

    def post(self, path: str, body: Any, timeout_s: float = 60) -> httpx.Response:
        return httpx.post(self.base_url + path, json=body, timeout=timeout_s, trust_env=False)

    def answers(self, path: str, status: int = 200) -> bool:
        try:
            return self.get(path).status_code == status
        except httpx.TransportError:
            return False

    def wait_for(self, path: str, timeout_s: float = 120) -> float:
        """Milliseconds from `podman run` until `path` answered 200."""
        deadline = self.started + timeout_s
        while not self.answers(path):
            assert time.monotonic() < deadline, f"{path} never came:\n{self.logs()[-4000:]}"
            assert self.running(), f"the container left:\n{self.logs()[-4000:]}"
            time.sleep(0.02)
        return (time.monotonic() - self.started) * 1000

    @contextmanager
    def streaming(self, job_id: str, prompt: str, **fields: Any) -> Iterator[httpx.Response]:
        body = {"job_id": job_id, "prompt": prompt, **fields}
        with httpx.Client(base_url=self.base_url, timeout=60, trust_env=False) as client:
            with client.stream("POST", "/execute", json=body) as response:
                assert response.status_code == 200, response.read()
                yield response

    def execute(self, job_id: str, prompt: str, **fields: Any) -> sse.Stream:
        with self.streaming(job_id, prompt, **fields) as response:
            return sse.collect(response.iter_raw())

    def run(self, *command: str) -> str:
        """A command inside the container."""
        return podman("exec", self.name, *command)

    def inspect(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(podman("inspect", self.name))[0]
        return found

    def running(self) -> bool:
        return bool(self.inspect()["State"]["Running"])

    def logs(self) -> str:
        done = subprocess.run(
            ["podman", "logs", self.name], env=environment(), capture_output=True, text=True
        )
        return done.stdout + done.stderr

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """The exit code after the signal."""
        podman("kill", "--signal", number.name, self.name)
        return int(podman("wait", self.name))


@contextmanager
def running(image: str, *flags: str, options: tuple[str, ...] = ()) -> Iterator[Container]:
    """A container started with podman's `options` and the worker's `flags`, removed afterwards."""
    port = free_port()
    started = time.monotonic()
    name = podman("run", "--detach", f"--publish={port}:8080", *options, image, *flags)
    try:
        yield Container(name, port, started)
    finally:
        podman("rm", "--force", "--volumes", name, check=False)
