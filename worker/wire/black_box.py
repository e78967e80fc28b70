"""Records which request each thread of the engine is working on, in case the engine dies, and the
progress of native code.

The API process creates a page of shared memory, which the engine process writes, so it stays
readable however the engine ends. A record is a single store to memory.
"""

from __future__ import annotations

import mmap
import os
import sys

SMALL_INTAKE, LONG_INTAKE, LOOP = 0, 1, 2
"""The engine's threads that handle requests, as indices into `BlackBox.in_hand`."""
_N_THREADS = 3
MODEL, DRAFT, PROJECTOR = 0, 1, 2
"""The models that compute, as indices into `BlackBox.pulses`."""
_N_PULSES = 3
_PULSES_AT, _PULSE_BYTES = 64, 64
"""Pulses follow the records in the page, each in its own cache line."""


class BlackBox:
    """`in_hand[thread]` is the id of the request that the thread is working on; 0 means none."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd` comes from `create_file`. Without it, the memory is not shared."""
        self._memory = mmap.mmap(-1 if fd is None else fd, mmap.PAGESIZE)
        self.in_hand = memoryview(self._memory).cast("q")

    def close(self) -> None:
        """Release the page and its descriptor; afterwards nothing can be read."""
        self.in_hand.release()
        self._memory.close()

    @property
    def suspects(self) -> frozenset[int]:
        """Ids of the requests that the threads are working on."""
        return frozenset(self.in_hand[:_N_THREADS]) - {0}

    @property
    def pulses(self) -> tuple[int, ...]:
        """One counter per model; one of them changes while native code computes."""
        size = self.in_hand.itemsize
        starts = (_pulse_at(part) // size for part in range(_N_PULSES))
        return tuple([self.in_hand[start] for start in starts])

    def pulse_memory(self, part: int) -> memoryview:
        """Where a model writes its counter. The box cannot be closed while this view exists."""
        start = _pulse_at(part)
        return memoryview(self._memory)[start : start + _PULSE_BYTES]

    @staticmethod
    def create_file() -> int:
        """Create a box's file; returns its descriptor. It exists while it is open or mapped."""
        if sys.platform == "linux":
            # Not on a disk: it might be read-only, or full, so that the engine would die of its
            # first record.
            fd = os.memfd_create("llorch-black-box")
        else:
            import tempfile

            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.truncate(fd, mmap.PAGESIZE)
        return fd


def _pulse_at(part: int) -> int:
    return _PULSES_AT + part * _PULSE_BYTES
