"""Ends an answer at a line, as editors' plug-ins ask for: a line that is indented too little, or
the first one that is complete after a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable

from worker.wire.work import LineLimits


class LineGuard:
    """Follows a stream of text. The first line may have any indentation."""

    __slots__ = ("_began", "_clock", "_limits", "_n_blanks", "is_over")

    def __init__(self, limits: LineLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._began = limits.began
        self._n_blanks: int | None = None
        """The blanks at the line's beginning so far; `None` after the first other character."""
        self.is_over = False
        """Whether the answer ends here."""

    def feed(self, text: str, *, is_new: bool = True) -> str:
        """The part of the next text that belongs to the answer. Time ends no text that an earlier
        engine has sent, which is not `is_new`: to repeat it takes longer or less long."""
        if self.is_over or not text:
            return ""
        if self._began is None:
            self._began = self._clock()
        ends_line = is_new and "\n" in text
        if ends_line and 0 < self._limits.after_ms < 1000 * (self._clock() - self._began):
            self.is_over = True
        return self._indented(text) if self._limits.n_indent > 0 else text

    def _indented(self, text: str) -> str:
        for index, character in enumerate(text):
            if self._n_blanks is not None and character in " \t":
                self._n_blanks += 1
                continue
            if self._n_blanks is not None and self._n_blanks < self._limits.n_indent:
                self.is_over = True
                return text[:index]
            self._n_blanks = 0 if character == "\n" else None
        return text
