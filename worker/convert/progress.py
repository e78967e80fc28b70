"""Reports the progress of a conversion: JSON lines, a progress bar, or nothing but sentences.

Only the converter's main thread calls it, so nothing here locks.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import Any, Literal, Protocol, TextIO

from worker.errors import WorkerError
from worker.wire.messages import Progress

Style = Literal["json", "bar", "none"]
_INTERVAL_SECONDS = 0.1


class Reporter(Protocol):
    def step(self, phase: str, done_bytes: int, total_bytes: int) -> None: ...

    def fetch(self, progress: Progress) -> None:
        """Progress of the model's download, which precedes the conversion."""

    def note(self, sentence: str) -> None: ...

    def failed(self, error: WorkerError) -> None: ...

    def finished(self, result: dict[str, Any]) -> None: ...


def reporter(style: Style, stream: TextIO | None = None) -> Reporter:
    if style == "json":
        return JsonLines(stream or sys.stdout)
    return Bar(stream or sys.stderr, draw=style == "bar")


class _Pace:
    """Limits how often a phase is reported, and measures its rate."""

    def __init__(self) -> None:
        self.phase = ""
        self._began = self._reported = 0.0

    def due(self, phase: str, done: bool) -> bool:
        now = time.monotonic()
        if phase != self.phase:
            self.phase, self._began, self._reported = phase, now, now
            return True
        if done or now - self._reported >= _INTERVAL_SECONDS:
            self._reported = now
            return True
        return False

    def rate(self, done_bytes: int) -> float | None:
        seconds = time.monotonic() - self._began
        return done_bytes / seconds if seconds > 0 and done_bytes else None


class JsonLines:
    """One JSON object per line: `{"phase", "percent", "bytes_per_second"}`, then a result or an
    error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._pace = _Pace()

    def step(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        if self._pace.due(phase, done_bytes >= total_bytes):
            percent = 100.0 * done_bytes / total_bytes if total_bytes else 100.0
            self.fetch(Progress(phase, round(percent, 2), self._pace.rate(done_bytes)))

    def fetch(self, progress: Progress) -> None:
        rate = progress.bytes_per_second
        self._write(
            {
                "phase": progress.phase,
                "percent": progress.percent,
                "bytes_per_second": None if rate is None else round(rate),
            }
        )

    def note(self, sentence: str) -> None:
        self._write({"note": sentence})

    def failed(self, error: WorkerError) -> None:
        self._write(
            {"error": {"code": error.code, "message": error.message, "details": error.details}}
        )

    def finished(self, result: dict[str, Any]) -> None:
        self._write({"result": result})

    def _write(self, value: dict[str, Any]) -> None:
        self._stream.write(json.dumps(value, default=str) + "\n")
        self._stream.flush()


class Bar:
    """A progress bar on a terminal; on other streams only the notes and the result."""

    def __init__(self, stream: TextIO, draw: bool) -> None:
        self._stream = stream
        self._draw = draw and stream.isatty()
        self._pace = _Pace()
        self._drawn = False

    def step(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        if not self._draw or not self._pace.due(phase, done_bytes >= total_bytes):
            return
        share = done_bytes / total_bytes if total_bytes else 1.0
        rate = self._pace.rate(done_bytes)
        text = f" {share:4.0%} {phase:<8}"
        if total_bytes > 1:  # The check phase has no bytes.
            text += f" {_size(done_bytes):>8} / {_size(total_bytes)}"
        if rate and total_bytes > 1:
            remaining = (total_bytes - done_bytes) / rate
            text += f" {rate / 1e6:7.0f} MB/s  {_clock(remaining)} left"
        width = max(10, shutil.get_terminal_size().columns - len(text) - 3)
        filled = round(share * width)
        self._stream.write(f"\r[{'#' * filled}{'.' * (width - filled)}]{text}")
        self._stream.flush()
        self._drawn = True

    def fetch(self, progress: Progress) -> None:
        """Shows nothing: the hub's client draws its own bar."""

    def note(self, sentence: str) -> None:
        self._line(f"note: {sentence}")

    def failed(self, error: WorkerError) -> None:
        self._line(f"llorch-convert: {error.message}")

    def finished(self, result: dict[str, Any]) -> None:
        self._line(
            f"wrote {result['path']}: {result['outtype']}, {result['n_tensors']} tensors, "
            f"{result['size_bytes']:,} bytes, {result['seconds']:.1f} s, verified"
        )

    def _line(self, sentence: str) -> None:
        if self._drawn:
            self._stream.write("\n")
            self._drawn = False
        self._stream.write(sentence + "\n")
        self._stream.flush()


def _size(n_bytes: int) -> str:
    """A size in powers of 1000, as usual for disks and rates."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes} B"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
