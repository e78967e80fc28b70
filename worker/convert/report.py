"""What a conversion reports its progress to."""

from __future__ import annotations

from typing import Protocol


class Report(Protocol):
    """Called on the converter's main thread only."""

    def step(self, phase: str, done_bytes: int, total_bytes: int) -> None: ...

    def note(self, sentence: str) -> None: ...
