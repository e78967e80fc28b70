"""Frames of events on their way to the parent, sent by a thread of its own."""

from __future__ import annotations

import os
import queue
import threading

from worker.engine.transport import SyncChannel
from worker.messages import Event


class Outbox:
    """Sends the loop's frames from a thread of its own.

    Sending wakes the parent, which the system likes to run right where the sender runs: the
    engine thread would wait for it, and with it all threads of the next step.
    """

    MAX_FRAMES = 256
    """Then the loop waits for a parent that does not read."""

    def __init__(self, channel: SyncChannel) -> None:
        self._frames: queue.Queue[list[Event]] = queue.Queue(self.MAX_FRAMES)
        self._channel = channel
        threading.Thread(target=self._send_all, name="outbox", daemon=True).start()

    def put(self, events: list[Event]) -> None:
        self._frames.put(events)

    def flush(self) -> None:
        """Wait until everything is sent."""
        self._frames.join()

    def _send_all(self) -> None:
        try:
            while True:
                self._channel.send(self._frames.get())
                self._frames.task_done()
        except ConnectionError:  # the parent is gone, and so are we
            os._exit(0)
