"""Draws one token from a row of logits, in general without sorting the vocabulary.

The order is llama.cpp's: top-k, top-p, min-p, temperature, draw. Plain NumPy in single precision;
sums that are compared are in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.errors import InferenceFailed

Logits = npt.NDArray[np.float32]

COLDEST = 1e-4
"""A lower temperature counts as zero: logits would be e^1000 apart, and the division overflow."""
_SMALLEST_REPETITION_PENALTY = 1e-2
"""Zero would divide logits by zero. At this value, a repeated token wins anyway."""
_BLOCK = 64
"""The number of logits in a block, of which one maximum or one sum is computed first."""
_FIRST_GUESS = 128
"""This many of the likeliest tokens usually hold the whole nucleus."""
_MASK = (1 << 64) - 1
_LOWEST = np.finfo(np.float32).min


def dice(seed: int, position: int, attempt: int = 0) -> float:
    """A number from [0, 1) for one draw of one token; the same on every machine and at any time.

    SplitMix64 (Steele, Lea, Flood 2014), with a state from seed, position and attempt.
    """
    state = _mixed(_mixed(seed & _MASK) + position * 0x9E3779B97F4A7C15 + attempt)
    return (state >> 11) / (1 << 53)


def _mixed(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


@dataclass(frozen=True, slots=True)
class Cut:
    """Which tokens may be drawn, and the temperature."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def draw(self, logits: Logits, number: float) -> int:
        """The index of the token at `number` from [0, 1) in the cumulative distribution.

        Raises:
            InferenceFailed: a logit is NaN.
        """
        if self.temperature < COLDEST:
            return likeliest(logits)
        if math.isnan(logits.max()):
            raise not_a_number()
        kept = self._kept(logits)
        if kept is None:
            return _pick(_weights(logits, self.temperature), number)
        weights = _weights(logits[kept], self.temperature)
        return int(kept[_pick(weights, number)])

    def _kept(self, logits: Logits) -> npt.NDArray[np.intp] | None:
        """The tokens that may be drawn; `None` means all."""
        kept = None
        if 0 < self.top_k < len(logits):
            kept = largest(logits, self.top_k)
            if self.top_p < 1.0:
                kept = kept[: self._nucleus(_weights(logits[kept]))]
        elif self.top_p < 1.0:
            kept = self._nucleus_of_all(logits)
        if self.min_p > 0.0:
            left = logits if kept is None else logits[kept]
            likely = np.flatnonzero(left >= left.max() + math.log(self.min_p))
            kept = likely if kept is None else kept[likely]
        return kept if kept is None or len(kept) else None

    def _nucleus(self, weights: npt.NDArray[np.float32], total: float | None = None) -> int:
        """How many of the largest weights reach `top_p` together; 0 if all of these do not."""
        sums = weights.cumsum(dtype=np.float64)
        wanted = self.top_p * (sums[-1] if total is None else total)
        count = int(sums.searchsorted(wanted)) + 1
        return count if count <= len(sums) else (0 if total is not None else len(sums))

    def _nucleus_of_all(self, logits: Logits) -> npt.NDArray[np.intp]:
        """The nucleus, searched among more and more of the likeliest tokens."""
        weights = _weights(logits)
        total = float(weights.sum(dtype=np.float64))
        guess = _FIRST_GUESS
        while guess < len(logits):
            likeliest = largest(logits, guess)
            if count := self._nucleus(weights[likeliest], total):
                return likeliest[:count]
            guess *= 16
        everything = largest(logits, len(logits))
        return everything[: self._nucleus(weights[everything])]


def likeliest(logits: Logits) -> int:
    """The index of the largest logit; raises `InferenceFailed` if one is NaN."""
    token = int(logits.argmax())  # of a row with NaN, it is the first of these
    if math.isnan(logits[token]):
        raise not_a_number()
    return token


def not_a_number() -> InferenceFailed:
    """The error of outputs that hold NaN, which no sampler can order."""
    return InferenceFailed(
        "the model computed NaN: its weights are damaged, or their numbers overflow in the types "
        "that it computes with"
    )


def largest(logits: Logits, count: int) -> npt.NDArray[np.intp]:
    """The indices of the `count` largest logits above -inf, in falling order; at least one."""
    n_blocks = len(logits) // _BLOCK
    if count < n_blocks // 2:
        # `count` block maxima are above the bound, so at least as many logits are. A block is every
        # n-th logit, so that NumPy can use whole vector registers.
        peaks = logits[: n_blocks * _BLOCK].reshape(_BLOCK, n_blocks).max(axis=0)
        bound = np.partition(peaks, n_blocks - count)[n_blocks - count]
    elif count < len(logits):
        bound = np.partition(logits, len(logits) - count)[len(logits) - count]
    else:
        bound = _LOWEST
    # Logits that a constraint has forbidden are not sorted, however few others are left.
    found = np.flatnonzero(logits >= max(bound, _LOWEST))
    if not len(found):
        return np.array([logits.argmax()])
    return found[np.argsort(-logits[found])[:count]]


def _weights(logits: Logits, temperature: float = 1.0) -> npt.NDArray[np.float32]:
    """Probabilities up to a common factor; the largest is 1."""
    weights: Logits = logits - logits.max()
    if temperature != 1.0:
        weights /= np.float32(temperature)
    np.exp(weights, out=weights)
    return weights


def _pick(weights: npt.NDArray[np.float32], number: float) -> int:
    """The index at which the cumulative sum of the weights passes `number` times their total."""
    n_blocks = len(weights) // _BLOCK
    if n_blocks < _BLOCK:
        return _passed(weights, number)
    n_even = n_blocks * _BLOCK
    blocks = weights[:n_even].reshape(_BLOCK, n_blocks)
    rest = weights[n_even:].sum()
    sums = np.append(blocks.sum(axis=0), rest).cumsum(dtype=np.float64)
    wanted = number * sums[-1]
    block = min(int(sums.searchsorted(wanted, side="right")), n_blocks)
    below = sums[block - 1] if block else 0.0
    inside = min((wanted - below) / max(sums[block] - below, 1e-300), 1.0)
    if block == n_blocks:
        return n_even + _passed(weights[n_even:], inside)
    return block + n_blocks * _passed(blocks[:, block], inside)


def _passed(weights: npt.NDArray[np.float32], number: float) -> int:
    sums = weights.cumsum(dtype=np.float64)
    found = int(sums.searchsorted(number * sums[-1], side="right"))
    # If rounding gives the total itself, it is the last index with a weight.
    return found if found < len(sums) else int(sums.searchsorted(sums[-1]))


class Changes:
    """What a request adds to the logits of a few tokens: bias, then penalties.

    The changes are written into the row itself and undone after the draw, so the row is not copied.
    """

    def __init__(
        self,
        bias: dict[int, float],
        repetition: float,
        frequency: float,
        presence: float,
        prompt: Sequence[int],
    ) -> None:
        self._repetition = max(repetition, _SMALLEST_REPETITION_PENALTY)
        self._frequency, self._presence = frequency, presence
        self.remembers = repetition != 1.0 or frequency != 0.0 or presence != 0.0
        """Whether there are penalties, which depend on the tokens that were drawn."""
        # The repetition penalty counts the prompt, too (as in transformers). The other two
        # penalties count only the answer (as at OpenAI).
        said = set(prompt) if repetition != 1.0 else set()
        ids = [*bias, *(said - bias.keys())]
        self._row_of = {token: row for row, token in enumerate(ids)}
        room = max(2 * len(ids), 64)
        self._ids = np.zeros(room, np.intp)
        self._bias, self._count = np.zeros(room, np.float32), np.zeros(room, np.float32)
        self._said = np.zeros(room, np.bool_)
        self._ids[: len(ids)] = ids
        self._bias[: len(bias)] = list(bias.values())
        self._said[: len(ids)] = [token in said for token in ids]
        self._saved: Logits | None = None

    def __bool__(self) -> bool:
        return self.remembers or bool(self._row_of)

    def remember(self, token: int) -> None:
        if not self.remembers:
            return
        row = self._row_of.setdefault(token, len(self._row_of))
        if row == len(self._ids):
            for name in ("_ids", "_bias", "_count", "_said"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate((column, np.zeros_like(column))))
        self._ids[row] = token
        self._count[row] += 1
        self._said[row] = True

    def apply(self, logits: Logits) -> None:
        n = len(self._row_of)
        ids = self._ids[:n]
        self._saved = logits[ids]
        values = self._saved + self._bias[:n]
        if self._repetition != 1.0:
            punished = np.where(values > 0, values / self._repetition, values * self._repetition)
            values = np.where(self._said[:n], punished, values)
        if self._frequency or self._presence:
            count = self._count[:n]
            values = values - (count * self._frequency + (count > 0) * self._presence)
        logits[ids] = values

    def take_back(self, logits: Logits) -> None:
        logits[self._ids[: len(self._row_of)]] = self._saved
