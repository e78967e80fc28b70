"""Reports the progress of a conversion: JSON lines, a progress bar, or nothing but sentences.

Only the converter's main thread calls it, so nothing here locks.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Literal, NoReturn, Protocol, TextIO

from tqdm import tqdm

from worker.errors import WorkerError
from worker.wire.messages import Progress

Style = Literal["json", "bar", "none"]
_INTERVAL_SECONDS = 0.1
_BYTES = " {n_fmt}B / {total_fmt}B {rate_fmt} {remaining} left"


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
        self._bar: tqdm[NoReturn] | None = None

    def step(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        if not self._draw:
            return
        if self._bar is None or self._bar.desc.strip() != phase:
            self._close()
            # The check phase has no bytes.
            shown = _BYTES if total_bytes > 1 else ""
            self._bar = tqdm(
                total=total_bytes,
                desc=f"{phase:<8}",
                file=self._stream,
                unit="B",
                unit_scale=True,
                bar_format=f"{{percentage:3.0f}}% {{desc}} {{bar}}{shown}",
                ascii=" .#",
                dynamic_ncols=True,
            )
        self._bar.update(done_bytes - self._bar.n)

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
        self._close()
        self._stream.write(sentence + "\n")
        self._stream.flush()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
