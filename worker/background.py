"""Low-priority and daemon threads, and processes that end with their parent. Used in all
processes."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_NICENESS = 10
"""With 5, the event loop still had to wait for such a thread (`make attack`, many objects)."""
_PR_SET_PDEATHSIG = 1
_T = TypeVar("_T")


def background_thread(name: str) -> ThreadPoolExecutor:
    """An executor with one thread, which has a lower priority on Linux."""
    return ThreadPoolExecutor(1, name, initializer=_lower_priority)


def _lower_priority() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICENESS)


def in_daemon_thread(work: Callable[[], _T]) -> Future[_T]:
    """Run blocking work in a thread that does not delay the exit."""
    done: Future[_T] = Future()
    done.set_running_or_notify_cancel()  # a cancelled waiter does not cancel the work

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: B036 - passed on to the waiter
            done.set_exception(error)

    # `Thread.start` waits until the thread runs: for ever, if that fails for lack of memory.
    _thread.start_new_thread(run, ())
    return done


def die_with_parent(by: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Make the kernel send this process a signal when its parent ends for any reason. SIGKILL ends
    even a stopped process. The setting survives `exec`. Outside Linux this does nothing: at best,
    a child notices the end of its pipe. `parent` is the id of a parent that may have ended before
    this call."""
    if sys.platform == "linux":
        parent = parent or os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:
            os._exit(0)  # The parent died between the two calls.
