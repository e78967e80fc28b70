"""Sends frames of events to the parent, on a thread of its own."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator

from worker.observability.logs import get_logger
from worker.wire.messages import Event, PromptScored
from worker.wire.transport import SyncChannel


class Outbox:
    """Sending wakes the parent, and the system tends to run it on the sender's core. On the engine
    thread's core it would delay the next step on all threads.
    """

    MAX_FRAMES = 256
    """With more frames than this, the loop waits until the parent reads."""

    def __init__(self, channel: SyncChannel) -> None:
        # This queue takes no lock in Python.
        self._frames: queue.SimpleQueue[list[Event] | threading.Event] = queue.SimpleQueue()
        self._channel = channel
        threading.Thread(target=self._send_all, name="outbox", daemon=True).start()

    def put(self, events: list[Event]) -> None:
        self._frames.put(events)
        if self._frames.qsize() > self.MAX_FRAMES:
            self.flush()

    def flush(self) -> None:
        """Wait until all frames are sent."""
        sent = threading.Event()
        self._frames.put(sent)
        sent.wait()

    def _send_all(self) -> None:
        try:
            while True:
                frame = self._frames.get()
                if isinstance(frame, threading.Event):
                    frame.set()
                else:
                    for part in _parts(frame):
                        self._channel.send(part)
        except ConnectionError:  # without its parent, the engine process ends
            os._exit(0)
        except BaseException:  # only the stall timeout would notice a silent engine
            get_logger().exception("engine.outbox_failed")
            os._exit(70)


def _parts(frame: list[Event]) -> Iterator[list[Event]]:
    """Split a frame after each part of a prompt's log-probabilities."""
    start = 0
    for end, event in enumerate(frame, 1):
        if end == len(frame) or isinstance(event, PromptScored):
            yield frame[start:end]
            start = end
