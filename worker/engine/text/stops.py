"""Finds stop sequences in a stream of text, even across token boundaries.

All stops of a request are one automaton (Aho and Corasick 1975), so a character costs the same
however many stops there are and however long they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from worker.errors import InvalidRequest

MAX_STOP_CHARS = 8192
"""In all stops together: the automaton has a state for each, and is built before the answer."""


class _State:
    """A state of the automaton: the longest suffix of the text so far that begins a stop."""

    __slots__ = ("depth", "next", "shorter", "stop")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        """The length of that suffix."""
        self.next: dict[str, _State] = {}
        self.shorter: _State | None = None
        """The state of the next shorter such suffix; `None` for the start."""
        self.stop: str | None = None
        """The longest stop that ends here."""

    def after(self, character: str) -> _State:
        state: _State | None = self
        while state is not None:
            if (found := state.next.get(character)) is not None:
                return found
            start, state = state, state.shorter
        return start


@lru_cache(maxsize=8)
def _automaton(stops: tuple[str, ...]) -> _State:
    start = _State(0)
    for stop in stops:
        state = start
        for character in stop:
            state = state.next.setdefault(character, _State(state.depth + 1))
        state.stop = stop
    reached = deque([start])
    while reached:
        state = reached.popleft()
        for character, longer in state.next.items():
            longer.shorter = state.shorter.after(character) if state.shorter is not None else start
            longer.stop = longer.stop or longer.shorter.stop
            reached.append(longer)
    return start


class StopMatcher:
    """Finds the stop that is completed first, and holds back only text that may become a stop."""

    __slots__ = ("_held", "_state")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """
        Raises:
            InvalidRequest: the stops are too long.
        """
        if (n_chars := sum(map(len, stops))) > MAX_STOP_CHARS:
            most = f"all stops together must have at most {MAX_STOP_CHARS} characters"
            raise InvalidRequest.of_field("stop", f"{most}; they have {n_chars}")
        self._state = _automaton(tuple(stops)) if stops else None
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that can be sent now, and the stop that ended the stream, if one did.

        If a text has several stops, the one that is completed first counts; of those that are
        completed by the same character, the longest. The answer thus does not depend on how the
        text was cut into pieces.
        """
        state = self._state
        if state is None:
            return text, None
        n_held, text = len(self._held), self._held + text
        for end in range(n_held + 1, len(text) + 1):
            state = state.after(text[end - 1])
            if state.stop is not None:
                return text[: end - len(state.stop)], state.stop
        self._state, n_sent = state, len(text) - state.depth
        self._held = text[n_sent:]
        return text[:n_sent], None

    def finish(self) -> str:
        """The text that was held back for a stop that did not come."""
        return self._held
