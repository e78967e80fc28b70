"""Structured logs on stderr, one event per line, the same in the API and the engine process.

The main thread of each process calls `configure` once before anything logs; after that, any thread
may use `get_logger`. Lines from libraries that use the standard `logging` module have the same
form. Prompts, outputs and tokens are never logged: a text is identified by its `digest`, and
`_redact` replaces texts that are passed by mistake.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, TextIO, cast

from msgspec import msgpack

from worker.errors import escaped
from worker.lean_imports import unavailable

with unavailable("rich"):  # with rich, tracebacks would not be plain
    import structlog
    from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

bind = structlog.contextvars.bind_contextvars
"""Adds its keywords to all log lines of the current task."""
unbind_all = structlog.contextvars.clear_contextvars
CLEAR = "\r\x1b[K"
"""Moves to the beginning of the terminal's line and clears it."""
Format = Literal["auto", "json", "console"]

# Keys whose values are texts of users or of the model, or secrets.
_PRIVATE = frozenset(
    "prompt text t content messages output outputs token tokens input inputs delta piece "
    "authorization callback_token worker_token".split()
)


def configure(level: str = "info", format: Format = "auto", worker_id: str = "") -> None:
    """Send every log line of this process to stderr, as JSON or for a terminal."""
    stream = cast(TextIO, _Unblocked(sys.stderr))
    json_lines = format == "json" or (format == "auto" and not stream.isatty())
    if json_lines and isinstance(sys.stderr, io.TextIOWrapper):
        # JSON is UTF-8 in any locale.
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
    for_people = is_for_people(level, format)
    least = "warning" if for_people else level
    threshold = logging.getLevelNamesMapping()[least.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _identity(worker_id),
        _redact,
    ]
    closing: list[Processor]
    if json_lines:
        # `format_exc_info` prints no local variables, which could contain a prompt.
        renderer = structlog.processors.JSONRenderer(_as_json)
        closing = [structlog.processors.format_exc_info, renderer]
    else:
        console = structlog.dev.ConsoleRenderer(
            colors=moves_cursor() and not os.environ.get("NO_COLOR"),
            exception_formatter=structlog.dev.plain_traceback,
        )
        closing = [_drop_empty, structlog.processors.format_exc_info, _show_controls, console]
        if moves_cursor():
            closing.append(lambda _, name, text: f"{CLEAR}{text}")  # replaces the live line
        if for_people:
            closing.insert(0, _drop_failure)
    structlog.configure(
        processors=[*shared, *closing],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
    _adopt_standard_logging(stream, threshold, shared, closing)


def is_for_people(level: str, format: Format) -> bool:
    """Whether stderr is a terminal and the log settings are the defaults."""
    return format == "auto" and level == "info" and sys.stderr.isatty()


def moves_cursor() -> bool:
    """Whether stderr is a terminal that supports control sequences."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def get_logger() -> FilteringBoundLogger:
    return cast(FilteringBoundLogger, structlog.get_logger())


def digest(prompt: object) -> str:
    """The SHA-256 that identifies a prompt in logs: a text, bytes, or data of the pipe."""
    if isinstance(prompt, str):
        data = prompt.encode("utf-8", "surrogatepass")
    elif isinstance(prompt, bytes):
        data = prompt
    else:
        try:
            data = msgpack.encode(prompt)
        except OverflowError:  # an integer of more than 64 bits
            data = repr(prompt).encode()
    return hashlib.sha256(data).hexdigest()


def _identity(worker_id: str) -> Processor:
    def add(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
        event["worker_id"] = worker_id
        event.setdefault("correlation_id", None)
        return event

    return add


def _redact(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    for key in _PRIVATE.intersection(event):
        value = event[key]
        if value is not None:
            text = value if isinstance(value, str | bytes) else repr(value)
            event[key] = "sha256:" + digest(text)
    return event


def _drop_empty(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    return {key: value for key, value in event.items() if value is not None}


def _show_controls(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """Escape control characters, so that texts from clients and files cannot control the reader's
    terminal. Lines of a traceback are indented, so that none looks like a log line."""
    trace = event.pop("exception", "")
    shown = {key: escaped(v) if isinstance(v, str) else v for key, v in event.items()}
    if trace:
        shown["exception"] = "\n".join(f"    {escaped(line)}" for line in trace.split("\n"))
    return shown


def _as_json(event: EventDict, **_: object) -> str:
    """A JSON line with all control characters escaped. JSON does not require that, but a terminal
    may show the line, and some readers split lines at Unicode's line ends."""
    line = json.dumps(event, ensure_ascii=False, default=str)
    if line.isprintable():
        return line
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in line)


def _drop_failure(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """Drop `worker.failed`, because the sentence printed after it says the same."""
    if event["event"] == "worker.failed":
        raise structlog.DropEvent
    return event


def _adopt_standard_logging(
    stream: TextIO, threshold: int, shared: Iterable[Processor], closing: Iterable[Processor]
) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=list(shared),
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *closing],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(threshold, logging.WARNING) if threshold > 10 else threshold)
    # Below warnings, these libraries log URLs and body sizes.
    for name in ("httpcore", "httpx", "urllib3", "asyncio"):
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING))


class _Unblocked:
    """Writes whole lines to a stream without blocking, even if its reader leaves or stops reading.

    A line that cannot be written at once is lost. A pipe (on Linux) or a socket is written through
    a separate descriptor: other processes write to the shared one, so its flags must not change.
    Other files are written directly.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._unwritten = b""
        """The rest of a line that was only partly written."""
        self._send: Callable[[bytes], int] | None = None
        """Writes as much to a pipe or socket as fits; returns the number of bytes."""
        with contextlib.suppress(OSError, ValueError):
            fd = stream.fileno()
            kind = os.fstat(fd).st_mode
            if stat.S_ISSOCK(kind):
                own = socket.socket(fileno=os.dup(fd))
                self._send = lambda data: own.send(data, socket.MSG_DONTWAIT)
            elif stat.S_ISFIFO(kind):
                pipe = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
                self._send = partial(os.write, pipe)

    def write(self, text: str) -> int:
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._send is None:
                self._stream.write(text)
            else:
                data = self._unwritten + text.encode("utf-8", "replace")
                n_written = self._send(data)
                # A new line of which nothing was written is lost.
                rest = data if n_written >= len(self._unwritten) else self._unwritten
                self._unwritten = rest[n_written:]
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()
