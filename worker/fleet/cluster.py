"""The Ray cluster that the fleet runs on: its REST client, and a cluster on this machine.

`llorch-ray` does not import Ray: it starts Ray's own command, and deploys through the REST
interface of Ray's dashboard (https://docs.ray.io/en/latest/serve/api/index.html#serve-rest-api).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from filelock import FileLock

from worker.errors import ConfigError, WorkerError
from worker.installation import default_cache_dir
from worker.models.checksum import write_whole

INSTALL = "in the checkout, make ray (into .venv), or pip install '.[ray]'"
ADDRESS_VARIABLE = "RAY_DASHBOARD_ADDRESS"
"""The variable that Ray's own `serve` command reads."""
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
START_SECONDS = 600.0
"""Time for Ray to start. A busy machine takes minutes, and a Ray that ends is noticed at once."""
STOP_SECONDS = 60.0
REST_SECONDS = 900.0
"""Timeout of a REST call: Serve answers a deletion only after the last stream has ended."""
TROUBLE_SECONDS = 60.0
"""How long a call that fails in Ray is repeated, for example on a busy machine."""
LOCAL_ENVIRONMENT = {
    # These two suit the nodes of any cluster. A node counts as dead after five failed checks, which
    # by default take 15 s. Until then, Ray may place the replacements of its workers on it again.
    "RAY_health_check_period_ms": "1000",
    # Otherwise Ray ends the fleet's processes if the machine's memory is full for any reason.
    "RAY_memory_monitor_refresh_ms": "0",
    # Keeps a single machine's cluster on the loopback address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
TOKEN_VARIABLE = "LLORCH_WORKER_TOKEN"
_MARK = "LOCAL_RAY_OF_LLORCH"
"""An environment variable of all processes of a cluster that `up` started."""
_PROCESSES = Path("/proc")


class NoCluster(WorkerError):
    """Nothing answers at the address of Ray's dashboard."""

    code = "NO_CLUSTER"


def require_ray() -> None:
    """Raises `ConfigError` if Ray is not installed; the message says how to install it."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"A fleet runs on Ray, which is not installed here: {INSTALL}")


class Cluster:
    """A client of Serve's REST interface, which is part of Ray's dashboard."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.address = (environment.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS).rstrip("/")
        self.is_named = bool(environment.get(ADDRESS_VARIABLE))
        try:
            url = httpx.URL(self.address)
        except httpx.InvalidURL:
            url = httpx.URL()
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(
                f"{ADDRESS_VARIABLE} is {self.address!r}; it must be a URL such as "
                f"{DEFAULT_ADDRESS}."
            )
        self._http = httpx.Client(base_url=url, timeout=REST_SECONDS, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def details(self) -> dict[str, Any]:
        """Serve's report of its applications.

        Raises `NoCluster` if no dashboard answers, or `WorkerError` with Ray's own message.
        """
        try:
            return dict(self._call("GET").json())
        except (ValueError, TypeError):
            raise WorkerError(f"What answers at {self.address} is not a Ray cluster.") from None

    def deploy(self, configuration: Mapping[str, Any]) -> None:
        self._call("PUT", json=configuration)

    def delete(self) -> None:
        self._call("DELETE")

    def _call(self, method: str, **given: Any) -> httpx.Response:
        """The response. All calls are idempotent, so they can be repeated."""
        deadline = time.monotonic() + TROUBLE_SECONDS
        while True:
            try:
                answer = self._http.request(method, "/api/serve/applications/", **given)
                if not answer.is_error:
                    return answer
                trouble = WorkerError(f"Ray refuses: {answer.text.strip()[-2000:]}")
                is_final = answer.is_client_error
            except httpx.TransportError as error:
                trouble = NoCluster(
                    f"No Ray cluster answers at {self.address} ({error}); "
                    f"set {ADDRESS_VARIABLE} for another address."
                )
                is_final = isinstance(error, httpx.ConnectError)
            if is_final or time.monotonic() > deadline:
                raise trouble
            time.sleep(1)


class LocalNode:
    """The cluster that `up` started on this machine: one process of `ray start --block`."""

    def __init__(self) -> None:
        self._folder = default_cache_dir() / "fleet"
        self._file = self._folder / "ray.pid"
        self._token = self._folder / "token"
        self.log = self._folder / "ray.log"
        self._mark = str(self._file.absolute())
        self._started: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id that `start` recorded, if that process still exists."""
        if self._started is not None:  # Linux may not show its environment yet
            return self._started.pid if self._started.poll() is None else None
        with contextlib.suppress(OSError, ValueError):
            pid = int(self._file.read_text())
            os.kill(pid, 0)
            if not _PROCESSES.exists() or self._is_marked(_PROCESSES / str(pid)):
                return pid
        return None

    def _is_marked(self, process: Path) -> bool:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            mark = f"{_MARK}={self._mark}".encode()
            return mark in (process / "environ").read_bytes().split(b"\0")
        return False

    def locked(self) -> FileLock:
        """A lock that makes this user's other commands wait."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return FileLock(self._folder / "lock")

    def start(self, resources: str) -> None:
        """Start Ray in its own session, without waiting until it answers. The caller must hold the
        lock."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        command += ["--node-ip-address=127.0.0.1", "--port=0", "--dashboard-host=127.0.0.1"]
        command += ["--disable-usage-stats", f"--resources={resources}"]
        environment = {**os.environ, **LOCAL_ENVIRONMENT, _MARK: self._mark}
        environment.pop(TOKEN_VARIABLE, None)  # Ray shows its environment to its users
        with self.log.open("wb") as log:
            self._started = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, env=environment,
            )  # fmt: skip
        self._file.write_text(str(self._started.pid))

    def keep_token(self, token: str) -> Path:
        """Write the clients' token to a file that only this user can read; returns its path."""
        write_whole(self._token, token.encode(), mode=0o600)
        return self._token

    def forget_token(self) -> None:
        self._token.unlink(missing_ok=True)

    def stop(self) -> bool:
        """End Ray's process and its descendants; returns whether there were any.

        Raises `WorkerError` if the process has not ended after a minute.
        """
        if (pid := self.pid) is not None:
            self._end(pid)
        # If one of its processes was killed, Ray may leave others behind. They have the mark,
        # because they inherit Ray's environment. macOS does not show environments.
        left = [each for each in _PROCESSES.glob("[0-9]*") if self._is_marked(each)]
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)
        self._file.unlink(missing_ok=True)
        self.forget_token()
        return pid is not None or bool(left)

    def _end(self, pid: int) -> None:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while self.pid is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            if time.monotonic() > deadline:
                raise WorkerError(f"Ray's process {pid} does not end; {self.log} may say why.")
            time.sleep(0.1)
