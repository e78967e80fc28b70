"""`llorch-cpu` whose event loop waits for something for ever, once the worker is ready."""

from __future__ import annotations

import threading
from typing import Any

from worker.lifecycle import Lifecycle


def wait_for_ever(*_: Any) -> None:
    threading.Event().wait()


if __name__ == "__main__":
    # What the pool manager is told, behind `worker.ready`.
    Lifecycle._callback = wait_for_ever  # type: ignore[method-assign,assignment]
    from worker.cli import cpu

    cpu()
