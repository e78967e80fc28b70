"""The machine under test: its device, its workers, and the time a step may take."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.worker import PATIENCE_S, WorkerProcess
from tools.bench.servers import patient
from worker.devices import preflight
from worker.wire.backends import BackendName
from worker.wire.engine_settings import EngineSettings


@dataclass
class Bench:
    """State that all steps share. One worker runs at a time, by the backend's own command."""

    backend: BackendName
    out: Path
    expected: dict[str, Any]
    short: bool
    patience: float = 1.0
    """Factor for the time limits, which are for a quiet machine with a GPU."""

    @cached_property
    def cache(self) -> Path:
        """The cache of all calls, so that drivers compile only once."""
        folder = self.out / "cache"
        folder.mkdir(exist_ok=True)
        return folder

    def look(self) -> preflight.Findings:
        """The device as another process currently sees it."""
        asked = preflight.Questions(EngineSettings(backend=self.backend))
        return preflight.ask(asked, timeout_seconds=preflight.SECONDS * self.patience)

    @property
    def used_bytes(self) -> int | None:
        """Memory in use on the device according to the driver; `None` for a CPU."""
        used = [
            each.total_bytes - each.free_bytes
            for each in self.look().device or ()
            if each.total_bytes is not None and each.free_bytes is not None
        ]
        return sum(used) if used else None

    @property
    def device(self) -> str:
        """Return the device's name and its driver's versions."""
        found = self.look()
        chosen = {each.name for each in found.device or ()}
        names = found.library.devices if found.library else ()
        driver = found.library.driver if found.library else {}
        told = [each.description for each in names if each.name in chosen]
        return ", ".join(told + [f"{name} {version}" for name, version in driver.items()])

    @contextmanager
    def worker(self, *flags: str) -> Iterator[WorkerProcess]:
        folder = Path(tempfile.mkdtemp(prefix="worker-", dir=self.cache))
        running = WorkerProcess.start(
            *patient(self.patience),
            *("--speculate", "auto"),
            *flags,
            folder=folder,
            cache_dir=self.cache,
            backend=self.backend,
            wait_ready=False,
        )
        try:
            running.wait_ready(PATIENCE_S * self.patience)
            yield running
        finally:
            running.kill()


class Limit:
    """Raises `TimeoutError` in the main thread if the block takes longer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, self._over)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_error: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _over(self, _number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"not done within {self.seconds:.0f} s")
