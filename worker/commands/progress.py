"""Reports the progress of a conversion as JSON lines, as a live line, or not at all.

Only the converter's main thread calls it, so nothing here locks.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any, Literal, TextIO

from worker.errors import WorkerError
from worker.observability.terminal import LEAST_SECONDS_BETWEEN, LiveLine
from worker.wire.messages import Progress

Style = Literal["json", "bar", "none"]


class Reporter:
    """Writes a live line and notes to stderr and the result to stdout, or one JSON object per line
    to stdout: `{"phase", "percent", "bytes_per_second", "total_bytes"}`, then a result or an
    error."""

    def __init__(self, style: Style) -> None:
        self._is_json = style == "json"
        self._line = LiveLine(sys.stderr) if style == "bar" else None
        self._phase = ""
        self._phase_began = self._shown_at = 0.0

    def step(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._phase_began = phase, now
        elif done_bytes < total_bytes and now - self._shown_at < LEAST_SECONDS_BETWEEN:
            return
        self._shown_at = now
        seconds = max(now - self._phase_began, 1e-3)
        percent = 100 * done_bytes / total_bytes if total_bytes else 100.0
        rate = done_bytes / seconds if done_bytes else None
        self.show(Progress(phase, percent, rate, total_bytes))

    def show(self, progress: Progress) -> None:
        """Show progress, of the conversion or of the download before it."""
        if self._line is not None:
            self._line.show(progress)
        elif self._is_json:
            rate = progress.bytes_per_second
            line = {
                "phase": progress.phase,
                "percent": round(progress.percent, 2),
                "bytes_per_second": rate and round(rate),
                "total_bytes": progress.total_bytes,
            }
            self._write(sys.stdout, json.dumps(line))

    def note(self, sentence: str) -> None:
        self._say({"note": sentence}, f"note: {sentence}")

    def failed(self, error: WorkerError) -> None:
        fields = {"code": error.code, "message": error.message, "details": error.details}
        with contextlib.suppress(OSError):  # without a reader, the exit code still reports it
            self._say({"error": fields}, f"llorch-convert: {error.message}")

    def finished(self, result: dict[str, Any], sentence: str) -> None:
        """Report the result, on stdout so that it can be redirected."""
        self._say({"result": result}, sentence, sys.stdout)

    def _say(self, value: dict[str, Any], sentence: str, stream: TextIO | None = None) -> None:
        if self._line is not None:
            self._line.clear()
        # Names from the checkpoint's files may contain control characters.
        sentence = "".join(c if c.isprintable() or c == "\n" else "·" for c in sentence)
        if self._is_json:
            self._write(sys.stdout, json.dumps(value, default=str))
        else:
            self._write(stream or sys.stderr, sentence)

    def _write(self, stream: TextIO, line: str) -> None:
        stream.write(line + "\n")
        stream.flush()
