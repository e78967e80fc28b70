"""A worker's process as its owner sees it: spawn, log, health and stop.

One thread reads the worker's log, so that a full pipe never stops the worker. Everything else runs
on the owner's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque

from worker.child_processes import how_it_ended
from worker.errors import QueueFull, WorkerError
from worker.fleet.endings import json_object
from worker.fleet.settings import FLEET_OWNED
from worker.fleet.upstream import Exchange, fetch
from worker.setting_faults import variable_of

MAX_MISSES = 3
"""Consecutive failures of `/health` after which the worker is killed."""
EXIT_SECONDS = 5.0
"""Time for the worker's exit after its drain; then it is killed."""
_READY_EVERY_SECONDS = 0.05
_LEVELS = ("debug", "info", "warning", "error")


def _environment() -> dict[str, str]:
    """The environment without settings that the fleet chooses: whoever started Ray may have set
    them for another worker. A config file stays: a group's number of slots is read from it, too."""
    owned = {variable_of(name) for name in FLEET_OWNED - {"config"}} | {"MODEL_PATH", "BIND_ADDR"}
    return {name: value for name, value in os.environ.items() if name.upper() not in owned}


class WorkerProcess:
    """A process of `llorch-<backend>` that does not outlive its owner's process."""

    def __init__(
        self, backend: str, host: str, token: str, arguments: list[str], log_level: str = "info"
    ) -> None:
        """`host` is this machine's address for gateways, `token` the worker's token. The worker
        logs its port at `info`, so lines below `log_level` are dropped here."""
        level = min(log_level, "info", key=_LEVELS.index)
        self._left_out = _LEVELS[: _LEVELS.index(log_level)]
        reading, self._death_pipe = os.pipe()
        command = [sys.executable, "-m", "worker.fleet.child", str(reading), backend]
        try:
            self._child = subprocess.Popen(
                [*command, *arguments, "--host", host, "--port", "0",
                 "--log-format", "json", "--log-level", level],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                pass_fds=(reading,), start_new_session=True,
                # As in `cli`: import nothing from the folder where Ray was started.
                env={**_environment(), "PYTHONSAFEPATH": "1", variable_of("worker_token"): token},
            )  # fmt: skip
        finally:
            os.close(reading)
        self._host = host
        self._port: int | None = None
        self._misses = 0
        self._last_lines: deque[str] = deque(maxlen=5)
        self._log_reader = threading.Thread(target=self._read_log, daemon=True)
        self._log_reader.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port; the port is known once the worker is ready."""
        assert self._port is not None
        return self._host, self._port

    @property
    def has_left(self) -> bool:
        return self._child.poll() is not None

    def _read_log(self) -> None:
        """Forward the log's lines, and read the port from them."""
        assert self._child.stderr is not None
        with self._child.stderr as log:
            for raw in log:
                line = raw.decode(errors="replace").rstrip("\n")
                self._last_lines.append(line)
                event = json_object(raw) if self._port is None or self._left_out else {}
                if event.get("event") == "worker.listening":
                    self._port = event["port"]
                if event.get("level") not in self._left_out:
                    print(line, file=sys.stderr, flush=True)

    async def until_ready(self) -> None:
        """Wait until it is ready; raises `WorkerError` with its last words if it ends first."""
        while True:
            if self.has_left:
                self._log_reader.join(timeout=5)
                raise WorkerError(self._last_words())
            with contextlib.suppress(QueueFull):
                if (answer := await self.ask("/ready")) is not None and answer.status == 200:
                    return
            await asyncio.sleep(_READY_EVERY_SECONDS)

    async def ask(self, path: str) -> Exchange | None:
        """The response to a GET; `None` if the worker does not answer in five seconds.

        Raises `QueueFull` if this process lacks the resources for a connection.
        """
        return await fetch(self.address, "GET", path) if self._port else None

    async def n_requests(self) -> int | None:
        """Number of the worker's requests, waiting and running; `None` if it does not answer."""
        with contextlib.suppress(QueueFull):
            if (answer := await self.ask("/health")) is not None:
                state: dict[str, int] = json.loads(answer.content)
                return state["running"] + state["queued"]
        return None

    async def check(self) -> None:
        """Raises `WorkerError` if the worker has ended, or is killed now for its failures."""
        if self.has_left:
            raise WorkerError(f"the worker has ended. {self._last_words()}")
        try:
            answer = await self.ask("/health")
        except QueueFull:  # a limit of this process, not of the worker
            return
        self._misses = 0 if answer is not None and answer.status == 200 else self._misses + 1
        if self._misses >= MAX_MISSES:
            self.kill()
            raise WorkerError("the worker no longer answers, or stays unhealthy")

    async def stop(self, seconds: float) -> None:
        """Drain the worker: it takes no new work and finishes what runs. It is killed if it has not
        exited a few seconds after its drain timeout, `seconds`."""
        if not self.has_left:
            self._child.send_signal(signal.SIGTERM)
        deadline = asyncio.get_running_loop().time() + seconds + EXIT_SECONDS
        while not self.has_left and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """Kill the worker. Its engine process ends too, since it watches a pipe of its own."""
        if self._death_pipe >= 0:
            os.close(self._death_pipe)
            self._death_pipe = -1
        if not self.has_left:
            self._child.kill()
            self._child.wait()

    def _last_words(self) -> str:
        """The worker's last line that is not JSON, else its last line, and how it ended."""
        plain = [line for line in self._last_lines if not line.startswith("{")]
        words = (plain or list(self._last_lines) or ["It printed nothing."])[-1]
        return f"{words} ({how_it_ended(self._child.poll())})"
