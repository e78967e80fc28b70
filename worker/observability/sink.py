"""A stream for log lines whose reader may leave or stop reading without stopping the worker.

Any thread of both processes uses it. A line that cannot be written at once is lost; nothing else
happens.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from typing import TextIO


class Sink:
    """Writes whole lines to the file behind `stream` without waiting for a reader.

    A pipe (on Linux) or a socket is written without blocking, through a separate descriptor: other
    processes write to the shared one, so its flags must not change. Other files are written
    directly.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._unwritten = b""
        """The rest of a line that was written in part."""
        self._pipe: int | None = None
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError, ValueError):
            fd = stream.fileno()
            kind = os.fstat(fd).st_mode
            if stat.S_ISSOCK(kind):
                self._socket = socket.socket(fileno=os.dup(fd))
            elif stat.S_ISFIFO(kind):
                self._pipe = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)

    def write(self, text: str) -> int:
        with self._lock:
            if self._pipe is None and self._socket is None:
                with contextlib.suppress(OSError, ValueError):
                    self._stream.write(text)
            else:
                self._write_or_lose(text.encode("utf-8", "replace"))
        return len(text)

    def _write_or_lose(self, line: bytes) -> None:
        data = self._unwritten + line
        try:
            if self._socket is not None:
                n_written = self._socket.send(data, socket.MSG_DONTWAIT)
            else:
                assert self._pipe is not None
                n_written = os.write(self._pipe, data)
        except OSError:
            return
        if n_written >= len(self._unwritten):
            self._unwritten = data[n_written:]
        else:
            self._unwritten = self._unwritten[n_written:]

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()
