"""The engine process, on a system without a thread left for it."""

from __future__ import annotations

import threading

from worker.engine import process


def fail(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


if __name__ == "__main__":
    vars(threading)["Thread"].start = fail
    process.main()
