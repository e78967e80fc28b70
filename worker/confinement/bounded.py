"""A program for hostile input: it forks processes whose time, memory and reach the kernel bounds.

This module has both ends. `serve` runs in the program. It forks a server process that answers the
requests on standard input. The server can open no files, and is killed when a request's time is
over, whatever native code it is in; then the program answers in its place, and forks the next one.
On other systems than Linux, only that time bounds its memory. `BoundedProgram` starts the program
and sends it requests, on any thread.

A request is its limit of CPU seconds and its size, then as many bytes. An answer is how the request
ended and a size, then as many bytes. After a failure nobody knows how much of the request has been
read, so the client sends a mark, and the program skips its input up to that and confirms it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import secrets
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Literal

from worker.confinement import seccomp

_REQUEST, _ANSWER = struct.Struct("=dI"), struct.Struct("=BI")
_ANSWERED, _LATE, _DIED, _SKIPPED = range(4)


class Ended(Exception):
    """The server gave no answer: its time was over, or it died, such as for lack of memory."""

    def __init__(self, why: Literal["time", "death"]) -> None:
        super().__init__(why)
        self.why = why


class Gone(Exception):
    """The program itself has died, for example because the system ran out of memory. Inside its
    walls, this process cannot start another."""


class BoundedProgram:
    """Starts the program; the first request waits for it. All its processes end with this one."""

    def __init__(self, module: str, *, is_quiet: bool = False) -> None:
        """`module` is the program's; `is_quiet` discards its standard error."""
        self._mark = secrets.token_bytes(16)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, self._mark.hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if is_quiet else None,
            bufsize=0,
        )
        self.pid = self._process.pid
        self._turn = threading.Lock()
        atexit.register(self.close)

    def close(self) -> None:
        with self._process:  # this closes its input, which ends it
            pass

    def ask(self, request: bytes, seconds: float) -> bytes:
        """The answer to a request, which may use so many `seconds` of CPU time.

        Raises:
            Ended: the server was killed or died; the next request gets a new one.
            Gone: the program has died, and no request will be answered any more.
        """
        asking, answers = self._process.stdin, self._process.stdout
        assert asking is not None and answers is not None
        try:
            with self._turn:
                while select.select([answers], [], [], 0)[0]:
                    self._read(answers)  # the failure of a server between two requests
                    self._skip(asking, answers)
                asking.write(_REQUEST.pack(seconds, len(request)))
                left = memoryview(request)
                while left:
                    left = left[asking.write(left) :]
                how, answer = self._read(answers)
                if how != _ANSWERED:
                    self._skip(asking, answers)
                    raise Ended("time" if how == _LATE else "death")
        except (BrokenPipeError, EOFError):
            raise Gone(f"the bounded program (process {self.pid}) has died") from None
        return answer

    def _skip(self, asking: IO[bytes], answers: IO[bytes]) -> None:
        asking.write(self._mark)
        how, _ = self._read(answers)
        assert how == _SKIPPED

    def _read(self, answers: IO[bytes]) -> tuple[int, bytes]:
        how, size = _ANSWER.unpack(self._exactly(answers, _ANSWER.size))
        return how, self._exactly(answers, size)

    def _exactly(self, answers: IO[bytes], size: int) -> bytes:
        found = bytearray(size)
        left = memoryview(found)
        while left:
            n_bytes = answers.readinto(left)  # type: ignore[attr-defined]
            if not n_bytes:
                raise EOFError
            left = left[n_bytes:]
        return bytes(found)


def serve(answer: Callable[[bytes], bytes], most_bytes: int) -> None:
    """Answer requests until the input ends. `most_bytes` is the memory that they may allocate."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    while True:
        server = os.fork()
        if not server:
            _bound(most_bytes)
            _answer_all(answer)
            os._exit(0)
        status = _wait_for(server)
        if not status:  # the input has ended
            return
        is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        try:
            _write(_LATE if is_late else _DIED, b"")
            _skip_to(bytes.fromhex(sys.argv[1]))
            _write(_SKIPPED, b"")
        except BrokenPipeError:  # the client has gone
            os._exit(0)  # otherwise Python would try to write the rest


def _wait_for(server: int) -> int:
    """Wait until the server has ended; returns its wait status. It is killed, whatever it is doing,
    as soon as nobody reads its answers any more."""
    if sys.platform == "linux":  # elsewhere it ends when it reads the end of its input
        with contextlib.suppress(OSError):  # a sandbox may refuse it
            with open(os.pidfd_open(server), "rb", buffering=0) as ended:
                watched = select.poll()
                watched.register(ended, select.POLLIN)
                watched.register(1, 0)  # reports only that the other end is closed
                if ended.fileno() not in dict(watched.poll()):
                    os.kill(server, signal.SIGKILL)
    return os.waitpid(server, 0)[1]


def _bound(most_bytes: int) -> None:
    """Bound this process for good: its memory, its files and its system calls."""
    bounds = {resource.RLIMIT_NOFILE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    with contextlib.suppress(FileNotFoundError, PermissionError):  # not Linux, or without /proc
        with open("/proc/self/statm", "rb") as file:
            n_pages = int(file.read().split()[0])
        bounds[resource.RLIMIT_AS] = n_pages * resource.getpagesize() + most_bytes
    for kind, most in bounds.items():
        _, allowed = resource.getrlimit(kind)
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(kind, (most, most))
    with contextlib.suppress(OSError):  # a kernel without it
        seccomp.restrict()


def _answer_all(answer: Callable[[bytes], bytes]) -> None:
    asked = sys.stdin.buffer
    while head := asked.read(_REQUEST.size):
        seconds, size = _REQUEST.unpack(head)
        request = asked.read(size)
        # The signal's default action ends the process.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            answered = answer(request)
        except MemoryError:
            os._exit(1)  # the memory that it still holds would be missing for the next request
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(_ANSWERED, answered)


def _skip_to(mark: bytes) -> None:
    """Read the input up to the mark, or its end."""
    seen = b""
    while not seen.endswith(mark) and (more := os.read(0, 1 << 16)):
        seen = seen[-len(mark) :] + more


def _write(how: int, answer: bytes) -> None:
    out = sys.stdout.buffer
    out.write(_ANSWER.pack(how, len(answer)))
    out.write(answer)
    out.flush()
