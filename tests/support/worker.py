"""A worker as its users have it: the installed command in a process of its own, over HTTP."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests import ROOT
from tests.support import sse

_counter = itertools.count()
PATIENCE_S = 240.0
"""How long to wait for what is immediate on a quiet machine; costs nothing once it happens."""
_ALIASES = {"MODEL_PATH", "BIND_ADDR", "CUDA_DEVICE"}


def installed(backend: str = "cpu") -> list[str]:
    """The installed entry point, or the same function if the package is not installed."""
    entry_point = Path(sys.executable).parent / f"llorch-{backend}"
    if entry_point.exists():
        return [str(entry_point)]
    return [sys.executable, "-c", f"from worker.cli import {backend}; {backend}()"]


def environment(cache_dir: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the caller's environment without settings of a worker, plus `extra`. Python's output
    is buffered, as for users."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("LLORCH_") and name not in (*_ALIASES, "PYTHONUNBUFFERED")
    }
    paths = [str(ROOT), *clean.get("PYTHONPATH", "").split(os.pathsep)]
    clean["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    clean["LLORCH_CACHE_DIR"] = str(cache_dir)
    return clean | dict(extra or {})


@dataclass(slots=True)
class WorkerProcess:
    """One running worker. `start` waits for its port, `wait_ready` for its engine."""

    process: subprocess.Popen[bytes]
    folder: Path
    port: int = 0

    @classmethod
    def start(
        cls,
        *flags: str,
        folder: Path,
        cache_dir: Path,
        env: Mapping[str, str] | None = None,
        backend: str = "cpu",
        command: Sequence[str] | None = None,
        wait_ready: bool = True,
    ) -> WorkerProcess:
        """`command` replaces the installed one of `backend`.

        Nothing is guessed unless flags or `env` say so: guesses depend on earlier requests, rows
        that are computed together round differently, and tests compare texts.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            process = subprocess.Popen(
                [*(command or installed(backend)), "--port", "0", "--log-format", "json", *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment(cache_dir, {"LLORCH_SPECULATE": "off", **(env or {})}),
                cwd=folder,  # never the checkout: nothing may depend on it
            )
        worker = cls(process, folder)
        try:
            worker.port = int(worker.wait_log("worker.listening")["port"] or 0)  # 0: a Unix socket
            if wait_ready:
                worker.wait_log("engine.ready")  # polling would take time from the worker
                worker.wait_ready()
        except BaseException:
            worker.kill()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def hold(self) -> Path:
        """While this file exists the engine waits, if it was started accordingly: see `held`."""
        return self.folder / "hold"

    @property
    def engine_pid(self) -> int:
        """Process id of the current engine."""
        return int(self.logs("engine.spawned")[-1]["pid"])

    def client(self, timeout: float | None = PATIENCE_S) -> httpx.Client:
        """A client over plain HTTP, without certificates, which take 30 ms to load."""
        return httpx.Client(base_url=self.base_url, trust_env=False, verify=False, timeout=timeout)

    # --- requests ---

    def get(self, path: str) -> httpx.Response:
        with self.client() as client:
            return client.get(path)

    def post(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, headers=headers)

    def answer(self, path: str, body: Any) -> Any:
        """Return the JSON of the answer to a request that is accepted."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def execute(self, prompt: str, **fields: Any) -> sse.Stream:
        """Run one job to its end."""
        with self.streaming(prompt, **fields) as response:
            assert response.status_code == 200, response.read()
            return sse.collect(response.iter_raw())

    @contextmanager
    def streaming(self, prompt: str, **fields: Any) -> Iterator[httpx.Response]:
        """The open response of one job."""
        body = {"job_id": new_job_id(), "prompt": prompt, **fields}
        with self.client() as client:
            with client.stream("POST", "/execute", json=body) as response:
                yield response

    # --- state ---

    def is_ready(self) -> bool:
        try:
            return self.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def wait_ready(self, seconds: float = PATIENCE_S) -> None:
        until(self.is_ready, lambda: f"not ready:\n{self.stderr[-4000:]}", self, seconds)

    @property
    def n_working(self) -> int:
        """Number of requests that it has, running or queued."""
        health = self.get("/health").json()
        return int(health["running"] + health["queued"])

    def wait_working(self, n: int) -> None:
        until(lambda: self.n_working == n, lambda: f"{self.n_working} and not {n}", self)

    def wait_idle(self) -> None:
        self.wait_working(0)

    def wait_status(self, path: str, status: int) -> None:
        until(lambda: self.get(path).status_code == status, lambda: f"{path} is never {status}")

    @property
    def n_queued(self) -> int:
        return int(self.get("/health").json()["queued"])

    def wait_queued(self, n: int) -> None:
        until(lambda: self.n_queued == n, lambda: f"{self.n_queued} queued and not {n}", self)

    def metric(self, name: str) -> float:
        """Return the value of a series; labels are part of `name`, as written in the metrics."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no series {name}")

    def wait_metric(self, name: str, value: float) -> None:
        until(lambda: self.metric(name) == value, lambda: self.get("/metrics").text)

    def wait_for_free_cells(self) -> None:
        """Wait until finished sequences have no cells except those that are kept for reuse."""

        def are_free() -> bool:
            return self.metric("worker_kv_cells_used") == self.metric("worker_kv_cells_cached")

        until(are_free, lambda: self.get("/metrics").text)

    def engines(self) -> list[psutil.Process]:
        """Return the engine processes; each has two more that render its templates."""
        return [each for each in self.children() if _is_engine(each)]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    @property
    def processes(self) -> list[psutil.Process]:
        """Return the API process, then all others."""
        return [psutil.Process(self.pid), *self.children()]

    def kill_engine(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.engine_pid, number)

    def replace_engine(self) -> None:
        """Kill the engine, and wait until another one is ready."""
        n_ready = len(self.logs("engine.ready"))
        self.kill_engine()
        self.wait_log("engine.ready", n_ready + 1)
        self.wait_ready()

    def freeze_engine(self) -> None:
        """Freeze the engine until `thaw_engine`: it computes, answers and reads nothing."""
        freeze(self.engine_pid)

    def thaw_engine(self) -> None:
        os.kill(self.engine_pid, signal.SIGCONT)

    # --- logs ---

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text("utf-8", "replace")

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text("utf-8", "replace")

    def logs(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return the JSON lines of stderr so far, of one event or all."""
        return [line for line in json_lines(self.stderr) if event in (None, line.get("event"))]

    def wait_log(self, event: str, n: int = 1) -> dict[str, Any]:
        """Wait until there are `n` lines of this event; returns the last one."""

        def lacking() -> str:
            return f"no {event} number {n}:\n{self.stderr[-4000:]}"

        until(lambda: len(self.logs(event)) >= n, lacking, self)
        return self.logs(event)[-1]

    # --- end ---

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        return self.process.wait(timeout_s)

    def stop(self) -> int:
        """Send SIGTERM and wait; returns the exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE_S)


@contextmanager
def asking(
    port: int, path: str, body: Any, headers: Mapping[str, str] | None = None
) -> Iterator[None]:
    """A client that has sent these bytes and reads nothing; it disconnects when the block ends.

    With a client library's timeout, a busy machine could move the disconnect before the request or
    after the answer.
    """
    content = json.dumps(body).encode()
    lines = {"Host": "localhost", "Content-Type": "application/json", **(headers or {})}
    lines["Content-Length"] = str(len(content))
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content)
        yield


def computed_s(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU seconds of these processes so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _is_engine(process: psutil.Process) -> bool:
    try:
        return "worker.engine.process" in process.cmdline()
    except psutil.NoSuchProcess:  # or it has ended and nobody has waited for it
        return False


@dataclass(frozen=True, slots=True)
class Exit:
    code: int
    stdout: str
    stderr: str

    @property
    def sentence(self) -> str:
        """Return the message for humans: the last line of stderr."""
        return self.stderr.strip().splitlines()[-1]

    @property
    def failure(self) -> dict[str, Any]:
        """The JSON line that names the cause."""
        failures = [x for x in json_lines(self.stderr) if x.get("event") == "worker.failed"]
        assert len(failures) == 1, self.stderr
        return failures[0]


def run_to_exit(
    *flags: str,
    cache_dir: Path,
    env: Mapping[str, str] | None = None,
    backend: str = "cpu",
    command: Sequence[str] | None = None,
    timeout_s: float = PATIENCE_S,
) -> Exit:
    """Start a worker that is expected to exit by itself."""
    done = subprocess.run(
        [*(command or installed(backend)), *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment(cache_dir, env),
        cwd=cache_dir,
        timeout=timeout_s,
    )
    return Exit(done.returncode, done.stdout.decode(), done.stderr.decode())


def shown(
    command: str,
    cache_dir: Path,
    *flags: str,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the JSON that a subcommand prints."""
    done = subprocess.run(
        [*installed(), command, "--json", "--port", "0", *flags],
        env=environment(cache_dir, env),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def json_lines(text: str) -> list[dict[str, Any]]:
    """Return the JSON lines, without the plain lines that native code may print between them."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:  # an incomplete last line
                continue
    return found


def new_job_id() -> str:
    return f"job-{os.getpid()}-{next(_counter)}"


def freeze(pid: int) -> None:
    """SIGSTOP a process and wait until all its threads have stopped.

    The kernel stops each thread separately, and the call returns earlier: on a busy machine the
    process could answer one more request.
    """
    os.kill(pid, signal.SIGSTOP)

    def is_frozen() -> bool:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        states = {stat.rpartition(")")[2].split()[0] for stat in stats}
        return states == {"T"}

    until(is_frozen, lambda: f"process {pid} goes on after SIGSTOP")


def until(
    condition: Any,
    trouble: Any,
    worker: WorkerProcess | None = None,
    seconds: float = PATIENCE_S,
) -> None:
    """Poll `condition`; fails with `trouble()` if the time is over or the worker has exited."""
    deadline = time.monotonic() + seconds
    while not condition():
        left = worker is not None and worker.process.poll() is not None
        assert time.monotonic() < deadline and not left, trouble()
        time.sleep(0.02)
