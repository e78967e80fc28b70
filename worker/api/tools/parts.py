"""What the parsers of dialects that mark every part of an answer have in common.

Never raises, whatever the text. One per choice, any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from worker.api.output import OutputPiece
from worker.api.tools.calls import Calls
from worker.api.tools.choice import ToolUse


class PartsParser(ABC):
    def __init__(self, use: ToolUse | None) -> None:
        self._calls = Calls(use) if use is not None else None
        self._held = ""
        """Output that is not understood yet."""
        self._deltas: list[OutputPiece] = []

    def feed(self, text: str) -> list[OutputPiece]:
        """Take more output; returns the pieces that are certain by now."""
        return self._run(text, final=False)

    def finish(self) -> list[OutputPiece]:
        """The remaining pieces at the end of the output."""
        return self._run("", final=True)

    @property
    def n_calls(self) -> int:
        return self._calls.count if self._calls is not None else 0

    def _run(self, text: str, *, final: bool) -> list[OutputPiece]:
        self._held += text
        while self._held and self._step(final):
            pass
        if final:
            self._end_part()
        deltas, self._deltas = self._deltas, []
        return deltas

    @abstractmethod
    def _step(self, final: bool) -> bool:
        """Read some of what is held; false where more output is needed."""

    @abstractmethod
    def _end_part(self) -> None:
        """Emit what is only known at the end of a part."""

    def _start_call(self, name: str) -> None:
        assert self._calls is not None
        self._calls.start(name)
        self._take_calls(self._calls)

    def _add_arguments(self, text: str) -> None:
        assert self._calls is not None
        self._calls.arguments(text)
        self._take_calls(self._calls)

    def _take_calls(self, calls: Calls) -> None:
        self._deltas += calls.deltas
        calls.deltas = []
