"""Speculation by lookup: what followed the last three tokens before is tried again. Engine thread.

A stream that is alone leaves most of the device idle: each pass over the weights brings one token.
So a few guessed tokens go along as rows of their own, and the token after each is drawn as it would
be without: from its own logits, by its own dice. While the draws equal the guesses, a step brings
more than one token; at the first that does not, the rest is cut off. Nothing about the answer
changes: greedy ones stay what they are, and drawn ones keep their distribution and their seed.

It costs nothing where it does not pay: guesses are first compared with what comes without them, and
go along only while their measured hits are worth their measured rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from worker.engine.pace import Pace
from worker.engine.sequence import Sequence

N_GRAM = 3
MOST_GUESSES = 8
_FIRST_ACCEPTANCE = 0.3
_FIRST_ROW_COST = 0.25
"""Of a plain step, what one more row takes."""
_NEWEST = 0.1
"""Weight of one guess in the running means."""
_FORGOTTEN = 0.001
"""Of what rows cost, with each guess that is not tried."""
_MARGIN = 1.2
"""By which guesses have to be better: what is measured is not exact."""


@dataclass(slots=True)
class _Lookup:
    """What one sequence has said, by its n-grams."""

    request_id: int
    follows: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Where the token after an n-gram is, at its last place."""
    n_known: int = 0
    acceptance: float = _FIRST_ACCEPTANCE
    """Share of guesses that were right."""
    guess: int | None = None
    """The next token, if it was guessed and not tried."""


class Speculation:
    def __init__(self, is_eog: Callable[[int], bool], pace: Pace) -> None:
        self._is_eog, self._pace = is_eog, pace
        self._lookup = _Lookup(-1)
        self._row_cost = _FIRST_ROW_COST
        self.n_drafted = self.n_accepted = 0
        """Tokens since the start."""

    def draft(self, sequence: Sequence) -> list[int]:
        """Guesses for the tokens that follow, as many as are worth it; none for a request whose
        rows must be its own."""
        request = sequence.request
        if request.deterministic or request.sampling.logprobs is not None:
            return []
        lookup = self._lookup
        if lookup.request_id != sequence.request_id:
            lookup = self._lookup = _Lookup(sequence.request_id)
        tokens = sequence.tokens
        if lookup.guess is not None:
            right = tokens[-1] == lookup.guess
            lookup.acceptance += _NEWEST * (right - lookup.acceptance)
            lookup.guess = None
        at = self._place_of_last(lookup, tokens)
        room = min(MOST_GUESSES, sequence.n_most - len(tokens) - 1)
        if at is None or room < 1:
            return []
        guesses = tokens[at : at + room]
        for index, token in enumerate(guesses):
            if self._is_eog(token):  # nothing follows it
                del guesses[index:]
                break
        n_worth = self._worth(lookup.acceptance, len(guesses))
        if not n_worth:
            lookup.guess = guesses[0] if guesses else None
            # What rows cost is slowly forgotten: one bad moment of the machine is not for good.
            self._row_cost += _FORGOTTEN * (_FIRST_ROW_COST - self._row_cost)
        return guesses[:n_worth]

    def verified(self, sequence: Sequence, n_drafted: int, n_right: int, seconds: float) -> None:
        """So many of the draft's tokens were right, and their cells are the sequence's; the step
        took so long."""
        sequence.n_computed += n_right
        self.n_drafted += n_drafted
        self.n_accepted += n_right
        n_tried = min(n_right + 1, n_drafted)
        lookup = self._lookup
        better = lookup.acceptance + _NEWEST * (n_right - lookup.acceptance * n_tried)
        lookup.acceptance = min(max(better, 0.0), 0.98)
        plain = self._pace.decode_seconds(1)
        if plain > 0:
            cost = max(seconds / plain - 1, 0.0) / n_drafted
            self._row_cost += 2 * _NEWEST * (cost - self._row_cost)

    @staticmethod
    def _place_of_last(lookup: _Lookup, tokens: list[int]) -> int | None:
        """Where it goes on after the earlier place of the last n-gram; all but that is taken in."""
        follows, n = lookup.follows, len(tokens)
        for end in range(max(lookup.n_known, N_GRAM), n):
            follows[tuple(tokens[end - N_GRAM : end])] = end
        lookup.n_known = n
        return follows.get(tuple(tokens[-N_GRAM:])) if n > N_GRAM else None

    def _worth(self, acceptance: float, most: int) -> int:
        """How many guesses bring more tokens a second: each next one is right less often, and has
        to bring more than the step does on average without it."""
        tokens, seconds, chance = 1.0, 1.0, 1.0
        for count in range(most):
            chance *= acceptance
            if chance * seconds <= _MARGIN * self._row_cost * tokens:
                return count
            tokens, seconds = tokens + chance, seconds + self._row_cost
        return most
