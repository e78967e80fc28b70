"""The machine under test: its device, its workers, and the time a step may take."""

from __future__ import annotations

import signal
import subprocess
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


@dataclass
class Bench:
    """What all steps share. Workers are started one at a time, with the backend's own command."""

    backend: str
    out: Path
    expected: dict[str, Any]
    short: bool
    patience: float = 1.0
    """Times what a quiet machine with a GPU may take."""

    @cached_property
    def cache(self) -> Path:
        """Of all calls, so that what drivers have compiled is compiled once."""
        folder = self.out / "cache"
        folder.mkdir(exist_ok=True)
        return folder

    @contextmanager
    def worker(self, *flags: str) -> Iterator[WorkerProcess]:
        folder = Path(tempfile.mkdtemp(prefix="worker-", dir=self.cache))
        running = WorkerProcess.start(
            *patient(self.patience),
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
    """Raises `TimeoutError` in the main thread when the block takes longer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, self._over)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_error: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _over(self, _number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"not done within {self.seconds:.0f} s")


def device() -> str:
    shown = _nvidia_smi("name,driver_version,memory.total")
    return shown or "no NVIDIA GPU"


def used_bytes() -> int | None:
    """What the driver says is used on the first GPU; None where there is none."""
    shown = _nvidia_smi("memory.used")
    return int(shown.split()[0]) << 20 if shown else None


def _nvidia_smi(fields: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except OSError:
        return ""
    return shown.stdout.strip().split("\n")[0] if shown.returncode == 0 else ""
