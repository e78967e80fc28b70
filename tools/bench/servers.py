"""Starts, measures and stops the servers under test; only ever ends processes it started.

Each server is a child in a process group of its own. Runs in the benchmark's process.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import psutil

from tests.support.ports import free_port
from tools.bench.errors import BenchError
from tools.bench.example_server import example_packages
from tools.bench.model import draft_of
from tools.bench.peer_build import Peers
from worker.settings import Settings

CHECKOUT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
READY_POLL_S, READY_TIMEOUT_S = 0.01, 120.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Number and length of a server's sequences, the same for each peer."""

    slots: int
    context_per_slot: int


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A server to compare: how to start it, and which path reports that it is ready."""

    name: str
    ready_path: str
    make_command: Callable[[int, Path, Shape | None, Path], list[str]]
    """(port, model, shape or its own defaults, scratch folder) → command line, without `flags`."""
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    patience: float = 1.0
    """Factor for the time limits of its starts, loads and waits."""

    def with_flags(self, more: Sequence[str]) -> ServerKind:
        return replace(self, flags=(*self.flags, *more))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of all processes of a server. RSS counts shared pages once in each process."""

    pss_bytes: int | None
    peak_rss_bytes: int


def patient(patience: float) -> list[str]:
    """Return the flags of a worker whose engine may take `patience` times as long for a step."""
    usual_s = Settings.model_fields["stall_timeout"].default
    return [] if patience == 1 else ["--stall-timeout", str(usual_s * patience)]


def worker_kind(
    name: str, flags: list[str], backend: str = "cpu", checkout: Path = CHECKOUT
) -> ServerKind:
    """The worker of a checkout, with the wheel and the packages of this Python."""
    entry = Path(sys.executable).with_name(f"llorch-{backend}")
    if not entry.is_file():
        raise BenchError(f"{entry} is missing; `make setup` installs the worker.")

    def command(port: int, model: Path, shape: Shape | None, scratch: Path) -> list[str]:
        line = [str(entry), "--model", str(model), "--host", HOST, "--port", str(port)]
        if shape is not None:
            line += ["--slots", str(shape.slots), "--context-length", str(shape.context_per_slot)]
        return line

    # Run the checkout's own code, whatever is installed, with byte code as in an installation.
    env = (("PYTHONPATH", str(checkout)), ("PYTHONDONTWRITEBYTECODE", ""))
    return ServerKind(name, "/ready", command, tuple(flags), env)


def llama_server_kind(peers: Peers, flags: list[str]) -> ServerKind:
    def command(port: int, model: Path, shape: Shape | None, scratch: Path) -> list[str]:
        line = [peers.program("llama-server"), "-m", str(model), "--no-webui"]
        line += ["--host", HOST, "--port", str(port)]
        if shape is not None:
            line += ["-np", str(shape.slots), "-c", str(shape.slots * shape.context_per_slot)]
        return line

    return ServerKind("llama-server", "/health", command, tuple(flags))


def example_kind(peers: Peers) -> ServerKind:
    """llama-cpp-python's example server, with its own defaults except for the shape."""
    packages = example_packages(peers)
    script = peers.sources / "examples" / "server" / "server.py"

    def command(port: int, model: Path, shape: Shape | None, scratch: Path) -> list[str]:
        config = scratch / f"example-{port}.json"
        model_options: dict[str, Any] = {"path": str(model)}
        if shape is not None:
            model_options["n_ctx"] = shape.slots * shape.context_per_slot
            model_options["n_seq_max"] = shape.slots
        server = {"host": HOST, "port": port}
        config.write_text(json.dumps({"server": server, "model": model_options}), "utf-8")
        return [sys.executable, str(script), "-C", str(config)]

    env = (("PYTHONPATH", str(packages)),)
    return ServerKind("example-server", "/healthz", command, env=env)


class RunningServer:
    """A started server. `startup_s` is the time from the spawn until its readiness answers 200."""

    def __init__(self, kind: ServerKind, model: Path, shape: Shape | None, scratch: Path) -> None:
        self.kind = kind
        self.port = free_port()
        self.log_path = scratch / f"{kind.name}-{self.port}.log"
        self._log: IO[bytes] = self.log_path.open("wb")
        flags = [flag.replace("{draft}", str(draft_of(model))) for flag in kind.flags]
        started = time.perf_counter()
        self.process = subprocess.Popen(
            [*kind.make_command(self.port, model, shape, scratch), *flags],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **dict(kind.env)},
            process_group=0,
        )
        try:
            self._await_ready()
            self.startup_s = time.perf_counter() - started
            self.model_id = self._model_id()
        except BaseException:
            self.stop()
            raise

    def _await_ready(self) -> None:
        limit_s = READY_TIMEOUT_S * self.kind.patience
        deadline = time.perf_counter() + limit_s
        while time.perf_counter() < deadline:
            if self.process.poll() is not None:
                raise BenchError(
                    f"{self.kind.name} ended with {self.process.returncode} before it was ready: "
                    f"{self.log_tail()}"
                )
            if self._status(self.kind.ready_path) == 200:
                return
            time.sleep(READY_POLL_S)
        raise BenchError(f"{self.kind.name} was not ready in {limit_s:.0f} s.")

    def _status(self, path: str) -> int:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def get(self, path: str) -> str:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise BenchError(f"{self.kind.name} does not answer GET {path}: {error}") from error
        finally:
            connection.close()

    def _model_id(self) -> str:
        models = json.loads(self.get("/v1/models"))
        return str(models["data"][0]["id"])

    def log_tail(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(lines[-5:])

    def processes(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def cpu_seconds(self) -> dict[int, float]:
        seconds = {}
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds[process.pid] = times.user + times.system
        return seconds

    def memory(self) -> Memory:
        pss = peak = 0
        has_pss = True
        for process in self.processes():
            try:
                info = process.memory_full_info()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            peak += _peak_rss_bytes(process.pid) or info.rss
            has_pss = has_pss and hasattr(info, "pss")
            pss += getattr(info, "pss", 0)
        return Memory(pss if has_pss else None, peak)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                # The group was made for this server and has no other processes.
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(STOP_TIMEOUT_S)
        self._log.close()


def _peak_rss_bytes(pid: int) -> int | None:
    """Return the kernel's own peak, if it keeps one: nothing is sampled while a load runs."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
