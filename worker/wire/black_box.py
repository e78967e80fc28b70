"""Records which request each thread of the engine has in hand, for the case that it dies, and how
far native code has come.

The API process makes a page of shared memory and the engine process writes it, so it can be read
however the engine has ended. A record is a single store into memory.
"""

from __future__ import annotations

import mmap
import os
import sys

SMALL_INTAKE, LONG_INTAKE, LOOP = 0, 1, 2
"""The engine's threads that handle requests, as indices of `BlackBox.in_hand`."""
_N_THREADS = 3
MODEL, DRAFT, PROJECTOR = 0, 1, 2
"""What computes, as indices of `BlackBox.pulses`."""
_N_PULSES = 3
_PULSES_AT, _PULSE_BYTES = 64, 64
"""In the page: behind the records, each in a cache line of its own."""


class BlackBox:
    """`in_hand[thread]` is the id of the one request that the thread works for; 0 means none."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd` comes from `create_file`. Without it, no other process sees what is written."""
        self._memory = mmap.mmap(-1 if fd is None else fd, mmap.PAGESIZE)
        self.in_hand = memoryview(self._memory).cast("q")

    def close(self) -> None:
        """Give the page and its descriptor back; nothing can be read any more."""
        self.in_hand.release()
        self._memory.close()

    @property
    def suspects(self) -> frozenset[int]:
        """Ids of the requests in hand."""
        return frozenset(self.in_hand[:_N_THREADS]) - {0}

    @property
    def pulses(self) -> tuple[int, ...]:
        """Numbers of which one changes while native code computes."""
        size = self.in_hand.itemsize
        starts = (_pulse_at(part) // size for part in range(_N_PULSES))
        return tuple([self.in_hand[start] for start in starts])

    def pulse_memory(self, part: int) -> memoryview:
        """Where what computes writes its number. The box cannot be closed while it is held."""
        start = _pulse_at(part)
        return memoryview(self._memory)[start : start + _PULSE_BYTES]

    @staticmethod
    def create_file() -> int:
        """The descriptor of a file for one box. The file lives as long as it is open or mapped."""
        if sys.platform == "linux":
            # On no disk: there may be none that can be written, and a full one has no page for it,
            # which would end the engine at its first record.
            fd = os.memfd_create("llorch-black-box")
        else:
            import tempfile

            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.truncate(fd, mmap.PAGESIZE)
        return fd


def _pulse_at(part: int) -> int:
    return _PULSES_AT + part * _PULSE_BYTES
