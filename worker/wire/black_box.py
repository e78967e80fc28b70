"""What the engine was doing when it died: the request that each of its threads has in hand.

A page of shared memory that the API process makes and the engine process writes, so that it can be
read after the engine is gone, however it ended. Writing costs a store into memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile

SMALL_INTAKE, LONG_INTAKE, LOOP = 0, 1, 2
"""The threads that have requests in hand, as indices of `BlackBox.in_hand`."""
_N_THREADS = 3


class BlackBox:
    """`in_hand[thread]` is the id of the request that the thread works for alone; 0 is none."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd` is one that `create_file` made; without it nobody else sees what is written."""
        self._memory = mmap.mmap(-1 if fd is None else fd, mmap.PAGESIZE)
        self.in_hand = memoryview(self._memory).cast("q")

    @property
    def suspects(self) -> frozenset[int]:
        """Ids of the requests in hand."""
        return frozenset(self.in_hand[:_N_THREADS]) - {0}

    @staticmethod
    def create_file() -> int:
        """The descriptor of a file for one box, which lives as long as it is open or mapped."""
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            return os.dup(file.fileno())
