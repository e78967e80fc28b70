"""Speculation: tokens are guessed for a stream that runs alone, and verified beside its next one.

Such a stream leaves most of the device idle: each pass over the weights brings one token. So a few
guessed tokens go along as rows of their own, and the token after each is drawn as it would be
without: from the model's own logits, by the request's own dice. While the draws equal the guesses,
a step brings more than one token; at the first that does not, the rest is cut off. Nothing about
the answer changes: greedy ones stay what they are, and drawn ones keep their distribution and seed.

Where the guesses come from is the drafter's business (`lookup`, `draft`); how many are tried is
decided here. They go along while their measured hits are worth their measured rows, and an account
of what they won and lost bounds what all of them together can cost. Engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from worker.engine.pace import Pace
from worker.engine.sequence import Sequence

MOST_GUESSES = 15
_ROW_COST = 0.25
"""The expected time of one more row, as a share of a plain step."""
_NEWEST = 0.1
"""The weight of one guess in the mean acceptance of its stream."""
_NEWEST_OF_ALL = 0.02
"""The weight of one guess in the mean acceptance of all streams, where the next one begins."""
_FORGOTTEN = 0.001
"""The share of the measured cost of rows that each step without guesses forgets."""
_MARGIN = 1.2
"""Guesses must be worth so many times their cost, because measurements are not exact."""
_MOST_ACCEPTANCE = 0.98
_STAKE = 0.01
"""The share of all time that guesses may lose for good."""
_MOST_CREDIT = 8
"""The largest loss at any time, in plain steps, and the largest win that is remembered."""


class Drafter(Protocol):
    """Guesses what a stream says next."""

    first_acceptance: float
    """The share of its guesses that is expected to be right before any was seen."""
    computes: bool
    """Whether a guess takes time; otherwise it is looked up."""

    def follow(self, sequence: Sequence) -> bool:
        """Take in what was said so far; false while there is more of it than fits one step."""

    def guess(self, sequence: Sequence, most: int) -> list[int]:
        """The tokens that may follow, `most` at most."""


@dataclass(slots=True)
class _Stream:
    """The stream that is guessed for."""

    request_id: int
    acceptance: float
    """The share of guesses that were right."""
    is_allowed: bool = True
    untried: int | None = None
    """The next token, if it was guessed and not tried."""


class Speculation:
    def __init__(
        self,
        drafter: Drafter,
        is_eog: Callable[[int], bool],
        pace: Pace,
        batch: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`batch`: the most rows of one batch, of which the stream's own token has one."""
        self._drafter, self._is_eog, self._pace, self._clock = drafter, is_eog, pace, clock
        self._most = min(MOST_GUESSES, batch - 1)
        self._stream = _Stream(-1, 0.0)
        self._acceptance = drafter.first_acceptance
        """The mean of all streams."""
        self._guess_cost = 0.0
        """The time to make a guess, as a share of a plain step."""
        self._more: dict[int, float] = {}
        """The time to verify so many guesses, as a share of a plain step. The first guess is the
        dearest: a single row has kernels of its own."""
        self._account = float(_MOST_CREDIT)
        """The plain steps that guesses have won, less those that they have lost."""
        self.n_drafted = self.n_accepted = 0
        """Tokens since the start."""
        self.seconds = 0.0
        """The time that the drafter computed for the last draft."""

    def draft(self, sequence: Sequence) -> list[int]:
        """Guesses for the tokens that follow, as many as are worth it; none for a request whose
        rows must be its own."""
        plain, self.seconds = self._pace.decode_seconds(1), 0.0
        room = min(self._most, sequence.n_most - len(sequence.tokens) - 1)
        request = sequence.request
        sampling = request.sampling
        is_fixed = request.deterministic or sampling.logprobs is not None or sampling.learns
        if is_fixed or room < 1 or not plain:
            return []
        stream = self._stream
        if stream.request_id != sequence.request_id:
            stream = self._stream = _Stream(sequence.request_id, self._acceptance)
            stream.is_allowed = self._account > -_MOST_CREDIT
        self._book(_STAKE)
        if stream.untried is not None:
            self._learn(int(sequence.tokens[-1] == stream.untried), 1)
            stream.untried = None
        n_worth = self._worth(stream.acceptance, room) if stream.is_allowed else 0
        if not n_worth:
            # What rows cost is slowly forgotten: one bad moment of the machine is not for good.
            for count, more in self._more.items():
                self._more[count] = more + _FORGOTTEN * (_ROW_COST * count - more)
        if not self._drafter.computes:
            guesses = self._guessed(sequence, n_worth or 1)
            if not n_worth and guesses:
                stream.untried = guesses[0]
            return guesses if n_worth else []
        if not n_worth and self._account < _MOST_CREDIT:
            return []
        return self._computed(sequence, n_worth or 1, plain)

    def verified(self, sequence: Sequence, n_drafted: int, n_right: int, seconds: float) -> None:
        """Record that `n_right` guesses of a draft were right; their cells belong to the
        sequence."""
        sequence.n_computed += n_right
        self.n_drafted += n_drafted
        self.n_accepted += n_right
        self._learn(n_right, min(n_right + 1, n_drafted))
        if plain := self._pace.decode_seconds(1):
            more = max(seconds / plain - 1, 0.0)
            known = self._more.get(n_drafted, more)
            self._more[n_drafted] = known + 2 * _NEWEST * (more - known)
            self._book(n_right - more)

    # --- guesses -----------------------------------------------------------------------------

    def _guessed(self, sequence: Sequence, most: int) -> list[int]:
        if not self._drafter.follow(sequence):
            return []
        guesses = self._drafter.guess(sequence, most)
        for index, token in enumerate(guesses):
            if self._is_eog(token):  # nothing follows it
                return guesses[:index]
        return guesses

    def _computed(self, sequence: Sequence, most: int, plain: float) -> list[int]:
        began = self._clock()
        is_ready = self._drafter.follow(sequence)
        followed = self._clock()
        guesses = self._guessed(sequence, most) if is_ready else []
        ended = self._clock()
        if guesses:
            cost = (ended - followed) / plain / len(guesses)
            self._guess_cost += (2 * _NEWEST if self._guess_cost else 1) * (cost - self._guess_cost)
        self.seconds = ended - began
        self._book((began - ended) / plain)
        return guesses

    # --- what they are worth -------------------------------------------------------------------

    def _book(self, won: float) -> None:
        self._account = min(self._account + won, _MOST_CREDIT)

    def _learn(self, n_right: int, n_tried: int) -> None:
        """So many of the guesses that were reached were right."""
        stream = self._stream
        stream.acceptance = _moved(stream.acceptance, n_right, n_tried, _NEWEST)
        self._acceptance = _moved(self._acceptance, n_right, n_tried, _NEWEST_OF_ALL)

    def _worth(self, acceptance: float, most: int) -> int:
        """The number of guesses that brings most tokens a second; each next one is right less
        often."""
        best, best_rate = 0, 1.0
        tokens = chance = 1.0
        for count in range(1, most + 1):
            chance *= acceptance
            tokens += chance
            cost = self._verifying(count) + self._guess_cost * count
            rate = tokens / (1 + _MARGIN * cost)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _verifying(self, count: int) -> float:
        """As measured of so many guesses, or of the nearest number and rows as they are
        expected."""
        if count in self._more or not self._more:
            return self._more.get(count, _ROW_COST * count)
        nearest = min(self._more, key=lambda known: abs(known - count))
        return max(self._more[nearest] + _ROW_COST * (count - nearest), 0.0)


def _moved(acceptance: float, n_right: int, n_tried: int, weight: float) -> float:
    return min(max(acceptance + weight * (n_right - acceptance * n_tried), 0.0), _MOST_ACCEPTANCE)
