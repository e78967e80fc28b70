"""Draws one token from a row of logits, in general without sorting the vocabulary.

Plain NumPy in single precision; sums that are compared are in double precision.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from worker.errors import InferenceFailed

Logits = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]

_BLOCK = 64
"""The number of logits in a block; a first pass computes one maximum or one sum of each block."""
_FIRST_GUESS = 128
"""This many of the likeliest tokens usually contain the whole nucleus."""
_MASK = (1 << 64) - 1
LOWEST = np.finfo(np.float32).min


class NotANumber(InferenceFailed):
    """Outputs contain NaN or infinity, from which nothing can be drawn. The cells that were
    computed with them may make NaN of the outputs of others, too."""

    def __init__(self, what: str = "model") -> None:
        super().__init__(
            f"the {what} computed NaN or infinity: its weights are damaged, or its numbers "
            "overflow in the types that it computes with"
        )


def dice(seed: int, position: int, attempt: int = 0) -> float:
    """A number from [0, 1) for one draw of one token; it depends on the arguments alone.

    SplitMix64 (Steele, Lea, Flood 2014), with a state from seed, position and attempt.
    """
    state = _mixed(_mixed(seed & _MASK) + position * 0x9E3779B97F4A7C15 + attempt)
    return (state >> 11) / (1 << 53)


def _mixed(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def likeliest(logits: Logits) -> int:
    """The index of the largest logit; raises `NotANumber` if that is NaN or infinite."""
    token = int(logits.argmax())  # the first NaN, if there is one
    if not math.isfinite(logits[token]):
        raise NotANumber
    return token


def largest(values: Logits, count: int) -> Indices:
    """The indices of the `count` largest values above -inf, in descending order; at least one."""
    n_blocks = len(values) // _BLOCK
    if count < n_blocks // 2:
        # `count` block maxima reach the bound, so at least as many values do. A block is every
        # n-th value, so that NumPy can use whole vector registers.
        peaks = values[: n_blocks * _BLOCK].reshape(_BLOCK, n_blocks).max(axis=0)
        bound = np.partition(peaks, n_blocks - count)[n_blocks - count]
    elif count < len(values):
        bound = np.partition(values, len(values) - count)[len(values) - count]
    else:
        bound = LOWEST
    # Logits that a constraint has forbidden are never sorted, however few others are left.
    found = np.flatnonzero(values >= max(bound, LOWEST))
    if not len(found):
        return np.array([values.argmax()])
    return found[np.argsort(-values[found])[:count]]


def nucleus(values: Logits, weights: Logits, share: float, least: int, side: str) -> Indices:
    """The indices of the largest values whose weights sum to `share` of the total, in descending
    order; at least `least` of them.

    The sum reaches `share` if `side` is "left", and exceeds it if `side` is "right". The search
    goes through more and more of the largest values.
    """
    wanted = share * float(weights.sum(dtype=np.float64))
    guess = max(_FIRST_GUESS, least)
    while True:
        index = largest(values, guess)
        if count := reached(weights[index], wanted, side):
            return index[: max(count, least)]
        if guess >= len(values):
            return index
        guess *= 16


def reached(weights: Logits, wanted: float, side: str) -> int:
    """How many of the first weights sum to `wanted`; 0 if all together do not."""
    sums = weights.cumsum(dtype=np.float64)
    count = int(np.searchsorted(sums, wanted, side=side)) + 1  # type: ignore[call-overload]
    return count if count <= len(sums) else 0


def weights_of(logits: Logits, temperature: float = 1.0) -> Logits:
    """Probabilities up to a common factor; the largest is 1."""
    weights: Logits = logits - logits.max()
    if temperature != 1.0:
        weights /= np.float32(temperature)
    np.exp(weights, out=weights)
    return weights


def pick(weights: Logits, number: float) -> int:
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


def _passed(weights: Logits, number: float) -> int:
    sums = weights.cumsum(dtype=np.float64)
    found = int(sums.searchsorted(number * sums[-1], side="right"))
    # If rounding yields the total itself, take the last index with a weight.
    return found if found < len(sums) else int(sums.searchsorted(sums[-1]))
