"""Finds stop sequences in a stream of text, even across the borders of tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the stop that is complete first, and holds back only text that may become a stop."""

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that can be sent now, and the stop that ended the stream, if one did.

        If a text has several stops, the one that is complete first counts; of those that are
        complete at once, the longest. The answer thus does not depend on how the text was cut into
        pieces.
        """
        if not self._stops:
            return text, None
        text = self._held + text
        found: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                found = candidate if found is None else min(found, candidate)
        if found is not None:
            self._held = ""
            return text[: found[1]], found[2]
        n_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held], None

    def finish(self) -> str:
        """The text that was held back for a stop that did not come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
