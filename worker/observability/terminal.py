"""Output for a person at a terminal: a live line during a start, then what the worker serves.

A worker writes it to stderr, on the API process's event loop, if `logs.is_for_people` is true; then
log lines below warnings are left out.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TextIO

from worker.observability.logs import CLEAR, moves_cursor
from worker.wire.engine_info import EngineInfo
from worker.wire.messages import Progress

STORY_PROMPT = "Once upon a time, there was a brave fox named"

_PHASE_TEXTS = {
    "starting": "starting",
    "hash": "looking for an earlier conversion",
    "resolve": "looking for the model",
    "download": "downloading",
    "verify": "checking",
    "check": "reading the checkpoint",
    "convert": "converting",
    "quantize": "quantizing",
    "preflight": "planning memory",
    "load": "loading",
    "residency": "checking that everything is on the device",
    "draft": "loading the draft model",
    "projector": "loading the projector",
    "warmup": "warming up",
}
LEAST_SECONDS_BETWEEN = 0.1
"""Between two reports of one phase."""
_BAR_WIDTHS = range(4, 25)
"""A narrow terminal has a shorter bar, or none."""
_USUAL_COLUMNS = 80


class LiveLine:
    """A line that each `show` overwrites, until `clear`; not shown if stderr cannot do that."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._phase = ""
        self._phase_began = self._percent_then = self._shown_at = 0.0

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.phase != self._phase:
            self._phase, self._phase_began = progress.phase, now
            self._percent_then = progress.percent
        elif now - self._shown_at < LEAST_SECONDS_BETWEEN:
            return
        self._shown_at = now
        n_columns = _columns(self._stream) - 1
        text = progress_text(progress, now - self._phase_began, self._percent_then, n_columns)
        # An encoding without the bar's blocks would show longer escapes, which do not fit one line.
        encoding = self._stream.encoding or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        self._write(CLEAR + text[:n_columns])

    def clear(self) -> None:
        self._write(CLEAR)

    def _write(self, text: str) -> None:
        if not moves_cursor():
            return
        with contextlib.suppress(OSError, ValueError):  # the terminal was closed
            self._stream.write(text)
            self._stream.flush()


def _columns(stream: TextIO) -> int:
    """The width of the stream's own terminal; stdout may be another, or none."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or _USUAL_COLUMNS
    return _USUAL_COLUMNS


def progress_text(
    progress: Progress, elapsed_seconds: float, percent_then: float, n_columns: int
) -> str:
    """A line such as `loading  ████████░░░░  62 %  3.1 of 5.0 GB  812.4 MB/s  3 s left`, whose bar
    takes what the figures leave of `n_columns`. `percent_then` is where the phase began, which is
    above 0 for a resumed download."""
    parts = [_PHASE_TEXTS.get(progress.phase, progress.phase)]
    share = min(max(progress.percent / 100, 0.0), 1.0)
    if share > 0:
        parts.append(f"{progress.percent:.0f} %")
        if (total := progress.total_bytes or 0) >= 1e6:
            unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
            parts.append(f"{share * total / unit:.1f} of {total / unit:.1f} {name}")
        if progress.bytes_per_second:
            parts.append(f"{progress.bytes_per_second / 1e6:.1f} MB/s")
        gained = share - percent_then / 100
        if gained > 0 and share < 1 and elapsed_seconds > 1:
            parts.append(f"{_duration(elapsed_seconds * (1 - share) / gained)} left")
        width = min(n_columns - len("  ".join(["", *parts])), _BAR_WIDTHS[-1])
        if width in _BAR_WIDTHS:
            filled = round(share * width)
            parts.insert(1, "█" * filled + "░" * (width - filled))
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def ready_text(uri: str, model_ref: str, info: EngineInfo, *, where: str) -> str:
    """The worker's address, the model and its device, and `where` to see them."""
    model = info.model
    slots = f"{info.slots} slot{'s' if info.slots > 1 else ''}"
    device = info.device if isinstance(info.device, str) else ", ".join(info.device)
    threads = f", {info.threads} threads" if device == "CPU" else ""
    return (
        f"Listening on {uri}\n"
        f"Serving {model_ref} ({model.architecture}, {model.n_params / 1e6:,.0f} M parameters, "
        f"{model.quant_kind}) on {device}{threads}: {slots}, context of "
        f"{model.context_length:,} tokens\n"
        f"{where}\n"
    )


def first_request(uri: str, key: str | None, prefix: str) -> str:
    """A command line that streams a story from the bundled model. `key` names the variable with the
    client's key, if one is needed; `prefix` precedes the paths on a Unix socket."""
    token = f'-H "Authorization: Bearer ${key}" ' if key is not None else ""
    where = f"{uri}/execute"
    if uri.startswith("unix:"):
        where = f"--unix-socket {uri.removeprefix('unix:')} http://localhost{prefix}/execute"
    body = f'{{"job_id":"story-1","prompt":"{STORY_PROMPT}","max_tokens":200,"temperature":0.7}}'
    return (
        f"Ready. This streams a story:\n\n"
        f"  curl -N {token}-H 'Content-Type: application/json' {where} -d '{body}'\n"
    )
