"""Runs a worker's image as its users do: `podman run` with flags, then HTTP.

podman uses few features (see `ENGINE`), so that it also runs inside a container.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
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
import pytest

from tests.support import sse
from tests.support.ports import free_port

RELEASE = "trixie"
BASE = f"localhost/llorch-base:{RELEASE}"
ENGINE = """\
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
"""


@cache
def environment() -> dict[str, str]:
    """podman's settings for these tests only."""
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


@cache
def base() -> str:
    """Make an image of a Debian root with debootstrap, so that no registry is needed."""
    _check_tools()
    if subprocess.run(["podman", "image", "exists", BASE], env=environment()).returncode != 0:
        _bootstrap(BASE)
    podman("run", "--rm", "--network=none", BASE, "true")  # minutes before a build needs it
    return BASE


def lent(folder: Path) -> list[str]:
    """Options that give a build the certificate of the machine's package index."""
    bundle = os.environ.get("PIP_CERT") or ssl.get_default_verify_paths().cafile
    if not bundle:
        return []
    pip, npm = folder / "pip.conf", folder / "npmrc"
    pip.write_text("[global]\ncert = /etc/lent-ca.crt\n")
    npm.write_text("cafile = /etc/lent-ca.crt\n")
    files = {bundle: "/etc/lent-ca.crt", pip: "/etc/pip.conf", npm: "/root/.npmrc"}
    return [f"--volume={here}:{there}:ro" for here, there in files.items()]


def _check_tools() -> None:
    """End the run with a message, before anything is built, if a tool is not installed."""
    tools = ["podman", "debootstrap"]
    if Path("/sys/fs/cgroup/unified").exists():
        tools.append("runc")  # crun refuses cgroups in hybrid mode
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        install = f"apt-get install {' '.join(tools)}"
        pytest.exit(f"make image-test lacks {', '.join(missing)}: {install}", 1)


def _bootstrap(tag: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["debootstrap", "--variant=minbase", RELEASE, folder],
            check=True,
            capture_output=True,
        )
        # As in Debian's slim images: no documentation, no package lists.
        for unneeded in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/lib/apt/lists"):
            shutil.rmtree(Path(folder, unneeded), ignore_errors=True)
        for archive in Path(folder, "var/cache/apt/archives").glob("*.deb"):
            archive.unlink()
        tar = subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE)
        assert tar.stdout is not None
        with tar:
            subprocess.run(
                ["podman", "import", "-", tag], stdin=tar.stdout, env=environment(), check=True
            )


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
        """Return the milliseconds from `podman run` until `path` answered 200."""
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

    def timed_story(self) -> tuple[sse.Stream, float]:
        """Return a streamed story, and the milliseconds until its first token."""
        chunks, first_ms = [], 0.0
        started = time.monotonic()
        with self.streaming("story", "Once upon a time", temperature=0, max_tokens=40) as response:
            for chunk in response.iter_raw():
                if not first_ms and b"event: token" in chunk:
                    first_ms = (time.monotonic() - started) * 1000
                chunks.append(chunk)
        return sse.collect(chunks), first_ms

    def run(self, *command: str) -> str:
        """Run a command inside the container."""
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

    def stop(self) -> int:
        """Send SIGTERM; returns the exit code."""
        podman("kill", "--signal", "SIGTERM", self.name)
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
