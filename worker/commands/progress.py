"""Reports the progress of a conversion: JSON lines, a progress bar, or nothing but sentences.

Only the converter's main thread calls it, so nothing here locks.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any, Literal, NoReturn, TextIO

from tqdm import tqdm

from worker.errors import WorkerError
from worker.wire.messages import Progress

Style = Literal["json", "bar", "none"]
_BYTES = " {n_fmt}B / {total_fmt}B {rate_fmt} {remaining} left"


class Reporter:
    """A bar on a terminal and only notes on other streams, then the answer on stdout; or one JSON
    object per line: `{"phase", "percent", "bytes_per_second"}`, then a result or an error."""

    def __init__(self, style: Style, stream: TextIO | None = None) -> None:
        self._is_json = style == "json"
        self._stream = stream or (sys.stdout if self._is_json else sys.stderr)
        self._draws = self._is_json or style == "bar" and self._stream.isatty()
        self._bar: tqdm[NoReturn] | None = None

    def step(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        if not self._draws:
            return
        if self._bar is None or self._bar.desc.strip() != phase:
            self._close()
            # The check phase has no bytes.
            shown = _BYTES if total_bytes > 1 else ""
            self._bar = (_Lines if self._is_json else tqdm)(
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
        """Progress of the model's download, which precedes the conversion; a bar shows none,
        because the hub's client draws its own."""
        if self._is_json:
            _write_progress(
                self._stream, progress.phase, progress.percent, progress.bytes_per_second
            )

    def note(self, sentence: str) -> None:
        self._say({"note": sentence}, f"note: {sentence}")

    def failed(self, error: WorkerError) -> None:
        said = {"code": error.code, "message": error.message, "details": error.details}
        with contextlib.suppress(OSError):  # without a reader, the exit code still tells
            self._say({"error": said}, f"llorch-convert: {error.message}")

    def finished(self, result: dict[str, Any], sentence: str) -> None:
        """The answer, which whoever redirects stdout wants there."""
        self._say({"result": result}, sentence, sys.stdout)

    def _say(self, value: dict[str, Any], sentence: str, answers: TextIO | None = None) -> None:
        self._close()
        # Names come out of the checkpoint's files, and may hold what a terminal obeys.
        sentence = "".join(c if c.isprintable() or c == "\n" else "·" for c in sentence)
        stream = self._stream if self._is_json or answers is None else answers
        stream.write((json.dumps(value, default=str) if self._is_json else sentence) + "\n")
        stream.flush()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _Lines(tqdm):  # type: ignore[misc]
    """A bar that is a line of JSON each time that it would be drawn."""

    def __init__(self, **settings: Any) -> None:
        self._stream: TextIO = settings.pop("file")
        super().__init__(file=io.StringIO(), mininterval=0.1, miniters=1, **settings)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        now = self.format_dict
        share = 100.0 * now["n"] / now["total"] if now["total"] else 100.0
        rate = now["rate"] or (now["n"] / now["elapsed"] if now["elapsed"] else None)
        _write_progress(self._stream, self.desc.strip(" :"), share, rate)


def _write_progress(stream: TextIO, phase: str, percent: float, rate: float | None) -> None:
    line = {"phase": phase, "percent": round(percent, 2), "bytes_per_second": rate and round(rate)}
    stream.write(json.dumps(line) + "\n")
    stream.flush()
