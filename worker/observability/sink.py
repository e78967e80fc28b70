"""A stream for log lines whose reader may leave or stop reading without stopping the worker.

Any thread of both processes uses it. A line that cannot be written at once is lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable
from functools import partial
from typing import TextIO


class Sink:
    """Writes whole lines to the file behind `stream` without waiting for a reader.

    A pipe (on Linux) or a socket is written without blocking, through a separate descriptor: other
    processes write to the shared one, so its flags must not change. Other files are written as is.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._unwritten = b""
        """The rest of a line that was written in part."""
        self._send: Callable[[bytes], int] | None = None
        """Writes to a pipe or a socket what it takes at once."""
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
                # A line of which nothing was written is lost.
                rest = data if n_written >= len(self._unwritten) else self._unwritten
                self._unwritten = rest[n_written:]
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()
