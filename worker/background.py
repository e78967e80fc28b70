"""Threads for work that may wait while others have something to do. Used in both processes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

_NICENESS = 10
"""With 5, the event loop still waited behind such a thread (`make attack`, many objects)."""


def background_thread(name: str) -> ThreadPoolExecutor:
    """One thread of lower priority, where the system has priorities of threads."""
    return ThreadPoolExecutor(1, name, initializer=_lower_priority)


def _lower_priority() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICENESS)
