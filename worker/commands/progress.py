"""Reports the progress of a conversion: JSON lines, a live line, or nothing but sentences.

Only the converter's main thread calls it, so nothing here locks.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any, Literal, TextIO

from worker.errors import WorkerError
from worker.observability.terminal import LiveLine
from worker.wire.messages import Progress

Style = Literal["json", "bar", "none"]
_LEAST_SECONDS_BETWEEN = 0.1


class Reporter:
    """A live line and notes on stderr, then the answer on stdout; or one JSON object per line, on
    stdout: `{"phase", "percent", "bytes_per_second"}`, then a result or an error."""

    def __init__(self, style: Style) -> None:
        self._is_json = style == "json"
        self._line = LiveLine(sys.stderr) if style == "bar" else None
        self._phase = ""
        self._phase_began = self._told_at = 0.0

    def step(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._phase_began = phase, now
        elif done_bytes < total_bytes and now - self._told_at < _LEAST_SECONDS_BETWEEN:
            return
        self._told_at = now
        seconds = max(now - self._phase_began, 1e-3)
        percent = 100 * done_bytes / total_bytes if total_bytes else 100.0
        self.show(Progress(phase, percent, done_bytes / seconds if done_bytes else None))

    def show(self, progress: Progress) -> None:
        """Also that of the model's download, which precedes the conversion."""
        if self._line is not None:
            self._line.show(progress)
        elif self._is_json:
            rate = progress.bytes_per_second
            line = {
                "phase": progress.phase,
                "percent": round(progress.percent, 2),
                "bytes_per_second": rate and round(rate),
            }
            self._write(sys.stdout, json.dumps(line))

    def note(self, sentence: str) -> None:
        self._say({"note": sentence}, f"note: {sentence}")

    def failed(self, error: WorkerError) -> None:
        said = {"code": error.code, "message": error.message, "details": error.details}
        with contextlib.suppress(OSError):  # without a reader, the exit code still tells
            self._say({"error": said}, f"llorch-convert: {error.message}")

    def finished(self, result: dict[str, Any], sentence: str) -> None:
        """The answer, which whoever redirects stdout wants there."""
        self._say({"result": result}, sentence, sys.stdout)

    def _say(self, value: dict[str, Any], sentence: str, stream: TextIO | None = None) -> None:
        if self._line is not None:
            self._line.clear()
        # Names come out of the checkpoint's files, and may hold what a terminal obeys.
        sentence = "".join(c if c.isprintable() or c == "\n" else "·" for c in sentence)
        if self._is_json:
            self._write(sys.stdout, json.dumps(value, default=str))
        else:
            self._write(stream or sys.stderr, sentence)

    def _write(self, stream: TextIO, line: str) -> None:
        stream.write(line + "\n")
        stream.flush()
