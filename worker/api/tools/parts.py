"""What the parsers of dialects that mark every part of an answer have in common.

Never raises, whatever the text. One per choice, any thread.
"""

from __future__ import annotations

from abc import abstractmethod

from worker.api.output import OutputPiece, Parser
from worker.api.tools.calls import Calls, ToolUse


class PartsParser(Parser):
    def __init__(self, use: ToolUse) -> None:
        self._calls = Calls(use)
        self._held = ""
        """Output that is not understood yet."""

    def run(self, text: str, *, final: bool) -> list[OutputPiece]:
        self._held += text
        while self._held and self._step(final):
            pass
        if final:
            self._end_part()
        deltas, self._calls.deltas = self._calls.deltas, []
        return deltas

    @abstractmethod
    def _step(self, final: bool) -> bool:
        """Read some of what is held; false where more output is needed."""

    def _end_part(self) -> None:
        """Emit what is only known at the end of a part."""
