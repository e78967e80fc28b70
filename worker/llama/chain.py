"""llama.cpp's samplers as small functions, and a request's chain of them.

A step takes the tokens that are left and returns those that it keeps. Bias and penalties change
logits in place; `Undo` takes that back. The chain's end draws one token. Each step follows
llama.cpp in its parameters, in `min_keep` and in forbidden tokens, which still count among the
tokens that are left although they cannot be drawn. Engine thread.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from worker.llama.draw import (
    LOWEST,
    Indices,
    Logits,
    NotANumber,
    largest,
    likeliest,
    nucleus,
    pick,
    reached,
    weights_of,
)
from worker.llama.model import Model
from worker.wire.sampling import Sampling

COLDEST = 1e-4
"""Below this temperature the likeliest token is drawn: scaled logits would be thousands apart."""
_DIVISIBLE = 1e-30
"""A temperature below this counts as zero: the division would overflow."""
_ADAPTIVE_WIDTH, _ADAPTIVE_PEAK, _ADAPTIVE_SHARPNESS = 0.3, 5.0, 10.0
_TINY = float(np.finfo(np.float32).tiny)
_INFILL_SHARE = 0.2
"""The least probability of a token with which `infill` continues the text."""
_INFILL_TOKENS = 1024
"""How many of the likeliest tokens `infill` considers; it is meant to follow top_k or top_p."""
_MIROSTAT_M = 100
"""The number of likeliest tokens by which mirostat 1 estimates how fast probabilities fall."""


class Kept(NamedTuple):
    """The tokens that are left."""

    logits: Logits
    ids: Indices | None
    """`None`: each logit's index is its token."""
    is_sorted: bool
    """Whether the logits are in descending order."""
    size: int
    """The number of tokens including the forbidden ones, which `logits` may lack."""

    def at(self, index: Indices | slice, *, is_sorted: bool, size: int | None = None) -> Kept:
        """The tokens at these indices; `size` is their number unless it is given."""
        logits = self.logits[index]
        if self.ids is not None:
            ids = self.ids[index]
        else:
            ids = np.arange(len(self.logits))[index] if isinstance(index, slice) else index
        return Kept(logits, ids, is_sorted, len(logits) if size is None else size)

    def token(self, index: int) -> int:
        return index if self.ids is None else int(self.ids[index])


Step = Callable[[Kept], Kept]


def top_k(count: int, kept: Kept) -> Kept:
    """Keep the `count` likeliest (Fan et al. 2018)."""
    if count >= kept.size:
        return kept
    index = slice(count) if kept.is_sorted else largest(kept.logits, count)
    return kept.at(index, is_sorted=True, size=count)


def top_p(share: float, min_keep: int, kept: Kept) -> Kept:
    """Keep the likeliest that together have this probability (Holtzman et al. 2019)."""
    weights = weights_of(kept.logits)
    if not kept.is_sorted:
        index = nucleus(kept.logits, weights, share, min_keep, "left")
        return kept.at(index, is_sorted=True, size=max(len(index), min(min_keep, kept.size)))
    count = reached(weights, share * float(weights.sum(dtype=np.float64)), "left")
    count = max(count or len(weights), min_keep)
    return kept.at(slice(count), is_sorted=True, size=min(count, kept.size))


def min_p(share: float, min_keep: int, kept: Kept) -> Kept:
    """Keep those with this share of the likeliest one's probability (Nguyen et al. 2024)."""
    index = np.flatnonzero(kept.logits >= kept.logits.max() + math.log(share))
    is_sorted = kept.is_sorted
    if len(index) < min_keep:
        index, is_sorted = largest(kept.logits, min_keep), True
    return kept.at(index, is_sorted=is_sorted, size=max(len(index), min(min_keep, kept.size)))


def typical_p(share: float, min_keep: int, kept: Kept) -> Kept:
    """Keep those whose surprise is nearest to the entropy, until they together have this
    probability (Meister et al. 2022)."""
    weights = _shares(kept)
    with np.errstate(divide="ignore"):
        surprise = -np.log(weights)
    entropy = _entropy(weights)
    distance = np.abs(surprise - np.float32(entropy))
    index = nucleus(-distance, weights, share, min_keep, "right")
    return kept.at(index, is_sorted=False, size=max(len(index), min(min_keep, kept.size)))


def top_n_sigma(n: float, kept: Kept) -> Kept:
    """Keep those at most `n` standard deviations below the largest logit (Tang et al. 2024)."""
    if kept.size <= 1:
        return kept
    possible = kept.logits[kept.logits >= LOWEST]
    least = kept.logits.max() - n * float(possible.std(dtype=np.float64))
    # llama.cpp forbids the others, but still counts them.
    return kept.at(np.flatnonzero(kept.logits >= least), is_sorted=kept.is_sorted, size=kept.size)


def infill(model: Model, kept: Kept) -> Kept:
    """Keep the likely continuations of a text before a gap, or the end: llama.cpp's `infill`.

    Tokens of which one begins another count as one. If no continuation is likely, the text ends.
    """
    order = largest(kept.logits, min(len(kept.logits), _INFILL_TOKENS))
    shares = weights_of(kept.logits)
    shares = (shares / shares.sum(dtype=np.float64))[order].astype(np.float64)
    tokens = [kept.token(index) for index in order.tolist()]
    is_end = np.array([token in model.eog for token in tokens])
    p_end, p_text = float(shares[is_end].sum()), float(shares[~is_end].sum())
    if 3 * p_end * kept.size > p_text:
        return kept.at(order[is_end], is_sorted=True)
    _merge_prefixes(shares, list(map(model.piece, tokens)))
    stays = (shares >= _INFILL_SHARE) | is_end
    n_texts = int((stays & ~is_end).sum())
    if n_texts == 0:
        return Kept(np.ones(1, np.float32), np.array([model.end_of_turn]), is_sorted=True, size=1)
    shares = np.where(stays, shares, 0) / shares[stays].sum()
    stays &= (shares >= 1 / (n_texts + 1)) | is_end
    return kept.at(order[stays], is_sorted=True)


def _merge_prefixes(shares: npt.NDArray[np.float64], pieces: list[bytes]) -> None:
    """Of two tokens of which one begins the other, give both shares to the likelier one."""
    by_piece = sorted(range(len(pieces)), key=pieces.__getitem__)
    sorted_pieces = [pieces[at] for at in by_piece]
    for first, piece in enumerate(pieces):
        if not piece or not shares[first]:
            continue
        start = bisect_left(sorted_pieces, piece)
        stop = start
        while stop < len(by_piece) and sorted_pieces[stop].startswith(piece):
            stop += 1
        for second in sorted(by_piece[start:stop]):
            if second == first or not shares[second]:
                continue
            to, of = (second, first) if shares[second] > shares[first] else (first, second)
            shares[to] += shares[of]
            shares[of] = 0
            if of == first:
                break


def xtc(threshold: float, min_keep: int, kept: Kept) -> Kept:
    """Drop those above the threshold, except the least likely of them: Exclude Top Choices."""
    if kept.size < 2:
        return kept
    weights = weights_of(kept.logits)
    least = max(threshold * weights.sum(dtype=np.float64), _TINY)  # no forbidden token reaches it
    above = np.flatnonzero(weights >= least)
    size = kept.size - len(above) + 1
    if len(above) < 2 or size < min_keep:
        return kept
    stays = np.ones(len(weights), np.bool_)
    stays[above] = False
    stays[above[weights[above].argmin()]] = True
    return kept.at(np.flatnonzero(stays), is_sorted=kept.is_sorted, size=size)


def temperature(value: float, kept: Kept) -> Kept:
    if value < _DIVISIBLE:
        index = np.array([kept.logits.argmax()])
        return kept.at(index, is_sorted=True, size=kept.size)
    return kept._replace(logits=kept.logits / np.float32(value))


def dynamic_temperature(value: float, spread: float, exponent: float, kept: Kept) -> Kept:
    """Apply a temperature from `value - spread`, if the entropy is 0, to `value + spread`, if it is
    as large as possible."""
    if kept.size <= 1:
        return kept
    share = _entropy(_shares(kept)) / math.log(kept.size)
    lowest = max(0.0, value - spread)
    return temperature(lowest + (value + spread - lowest) * share**exponent, kept)


def _entropy(shares: Logits) -> float:
    """In nats."""
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum(dtype=np.float64))


# --- the ends ----------------------------------------------------------------------------


class Plain:
    """Draws by the probabilities at a temperature, or the likeliest token below `COLDEST`."""

    state: tuple[float, ...] = ()
    """What an end has learned from the tokens that were drawn; this one learns nothing."""

    def __init__(self, value: float) -> None:
        self.value = value

    def weights(self, kept: Kept) -> tuple[Kept, Logits]:
        """The tokens that may be drawn, and their probabilities up to a common factor."""
        if self.value < COLDEST:
            return temperature(0.0, kept), np.ones(1, np.float32)
        return kept, weights_of(kept.logits, self.value)

    def after(self, kept: Kept, weights: Logits, index: int) -> tuple[float, ...]:
        """The state after the token at this index was drawn by these weights. `kept` is what the
        steps kept, before `weights` was called."""
        return ()


class Mirostat:
    """Keeps tokens of at most `mu` bits of surprise, and adjusts `mu` so that drawn tokens have
    `tau` bits (Basu et al. 2021). Version 1 estimates the number of such tokens by Zipf's law."""

    def __init__(self, version: int, tau: float, eta: float, n_vocab: int) -> None:
        self._version, self._tau, self._eta, self._n_vocab = version, tau, eta, n_vocab
        self.state: tuple[float, ...] = (2 * tau,)

    def weights(self, kept: Kept) -> tuple[Kept, Logits]:
        (mu,) = self.state
        if self._version == 1:
            kept = top_k(self._rank(kept, mu), kept)
        else:
            weights = weights_of(kept.logits)
            least = 2.0 ** max(min(-mu, 0.0), -1000.0) * float(weights.sum(dtype=np.float64))
            index = np.flatnonzero(weights >= min(least, 1.0))
            kept = kept.at(index, is_sorted=kept.is_sorted)
        return kept, weights_of(kept.logits)

    def _rank(self, kept: Kept, mu: float) -> int:
        """The number of tokens with at most `mu` bits, if their probabilities keep falling like
        those of the likeliest."""
        best = kept.logits[largest(kept.logits, _MIROSTAT_M)].astype(np.float64)
        if len(best) < 2:
            return 1
        places = np.arange(1.0, len(best))
        distances = np.log((places + 1) / places)
        slope = float((distances * -np.diff(best)).sum() / (distances * distances).sum())
        epsilon = slope - 1
        if slope <= 0 or epsilon == 0:
            return len(kept.logits)
        base = epsilon * 2.0 ** min(mu, 1000.0) / (1 - float(self._n_vocab) ** -epsilon)
        rank = math.exp(min(math.log(max(base, 1e-300)) / slope, 50.0))
        return max(int(min(rank, len(kept.logits))), 1)

    def after(self, kept: Kept, weights: Logits, index: int) -> tuple[float, ...]:
        share = float(weights[index]) / float(weights.sum(dtype=np.float64))
        surprise = -math.log2(max(share, 1e-300))
        return (self.state[0] - self._eta * (surprise - self._tau),)


class Adaptive:
    """Prefers tokens near a probability, and adjusts it so that drawn tokens have the target on
    average (llama.cpp's `adaptive-p`)."""

    def __init__(self, target: float, decay: float) -> None:
        self._target, self._decay = target, decay
        self.state: tuple[float, ...] = (target / (1 - decay), 1 / (1 - decay))

    def weights(self, kept: Kept) -> tuple[Kept, Logits]:
        total, count = self.state
        wanted = min(max(2 * self._target - total / count, 0.0), 1.0)
        distance = np.abs(_shares(kept) - np.float32(wanted)) / np.float32(_ADAPTIVE_WIDTH)
        logits = _ADAPTIVE_PEAK - _ADAPTIVE_SHARPNESS * distance * distance / (1 + distance)
        logits[kept.logits < LOWEST] = -np.inf
        return kept, weights_of(logits)

    def after(self, kept: Kept, weights: Logits, index: int) -> tuple[float, ...]:
        total, count = self.state
        share = float(_shares(kept)[index])
        return share + self._decay * total, 1 + self._decay * count


End = Plain | Mirostat | Adaptive
"""The end of a chain."""


def _shares(kept: Kept) -> Logits:
    weights = weights_of(kept.logits)
    weights /= weights.sum(dtype=np.float64)
    return weights


# --- the chain ---------------------------------------------------------------------------


class Undo:
    """Records what steps change in a row of logits, so that the row need not be copied."""

    def __init__(self) -> None:
        self._saved: list[tuple[Logits, Any, Logits]] = []

    def change(self, kept: Kept, at: Indices, values: Logits) -> Kept:
        """Set these values at these indices."""
        if kept.ids is None:
            self._saved.append((kept.logits, at, kept.logits[at]))
        kept.logits[at] = values
        return kept._replace(is_sorted=False)

    def take_back(self) -> None:
        while self._saved:
            logits, at, values = self._saved.pop()
            logits[at] = values


_KEEP_THE_LIKELIEST = (top_k, top_p, min_p, top_n_sigma)


def _is(step: Step, *functions: Callable[..., Kept]) -> TypeGuard[partial[Kept]]:
    """Whether a step is one of these functions, with its parameters."""
    return isinstance(step, partial) and step.func in functions


class Chain:
    """The steps and the end that a request asks for. `changes` has the steps that need the text or
    the model, by the samplers' names, and `bias`, which comes first."""

    def __init__(
        self, sampling: Sampling, changes: Mapping[str, Step], undo: Undo, n_vocab: int
    ) -> None:
        self._undo, self._keeps_odds = undo, sampling.post_sampling_probs
        self._steps, self.last = _path(sampling, changes, n_vocab)
        """The state of the end does not follow from the text: mirostat and adaptive_p learn from
        the probabilities of the tokens in it."""
        self._xtc_chance = sampling.xtc_probability
        self._without_xtc = [step for step in self._steps if not _is(step, xtc)]
        """The steps of a draw in which xtc does not act."""
        self._next: tuple[float, ...] = ()
        self._odds: tuple[Indices | None, Logits] | None = None
        is_cold = isinstance(self.last, Plain) and self.last.value < COLDEST
        self.is_greedy = is_cold and all(step is changes.get("bias") for step in self._steps)
        """Whether the likeliest token by logits and bias is drawn, regardless of the text."""
        self.needs_chance = self._without_xtc != self._steps
        """Whether `draw` needs a `chance`."""

    def draw(self, logits: Logits, number: float, chance: float = 1.0) -> int:
        """The token at `number` from [0, 1) in the cumulative distribution; xtc acts if `chance`
        from [0, 1) is below its probability.

        Raises:
            NotANumber: the largest logit is NaN or infinite.
        """
        steps = self._steps if chance < self._xtc_chance else self._without_xtc
        if self.is_greedy and not (steps or self._keeps_odds):
            return likeliest(logits)
        if not math.isfinite(logits.max()):
            raise NotANumber
        kept = Kept(logits, None, False, len(logits))
        try:
            for step in steps:
                kept = step(kept)
            final, weights = self.last.weights(kept)
            index = pick(weights, number)
            self._next = self.last.after(kept, weights, index)
        finally:
            self._undo.take_back()
        if self._keeps_odds:
            self._odds = final.ids, weights
        return index if final.ids is None else int(final.ids[index])

    def take(self) -> None:
        """Learn from the last draw: its token goes into the answer."""
        if self._next:
            self.last.state = self._next

    def give(self) -> None:
        """Forget the last draw: a token that was not drawn goes into the answer."""
        self._odds, self._next = None, ()

    def log_probabilities(self, token: int, n_top: int) -> tuple[float, list[tuple[int, float]]]:
        """The natural log-probability with which the token was drawn, and those of the `n_top`
        likeliest that could have been; a token that was given has the probability 1."""
        if self._odds is None:
            return 0.0, [(token, 0.0)][:n_top]
        ids, weights = self._odds
        total = math.log(weights.sum(dtype=np.float64))

        def share(index: int) -> float:
            return math.log(weights[index]) - total if weights[index] > 0 else -math.inf

        at = token if ids is None else int(np.flatnonzero(ids == token)[0])
        best = largest(weights, n_top).tolist() if n_top else []
        top = [(i if ids is None else int(ids[i]), share(i)) for i in best if weights[i] > 0]
        return share(at), top


def _path(sampling: Sampling, changes: Mapping[str, Step], n_vocab: int) -> tuple[list[Step], End]:
    """The steps in the request's order, without those that are off, and the end."""
    names = ("temperature",) if sampling.mirostat else sampling.samplers
    made = [_step(name, sampling, changes) for name in ("bias", *names)]
    steps = [step for step in made if step is not None]
    if sampling.mirostat:
        tau, eta = sampling.mirostat_tau, sampling.mirostat_eta
        return steps, Mirostat(sampling.mirostat, tau, eta, n_vocab)
    if sampling.learns:
        return steps, Adaptive(sampling.adaptive_target, sampling.adaptive_decay)
    return steps, _plain_end(steps)


def _step(name: str, sampling: Sampling, changes: Mapping[str, Step]) -> Step | None:
    least, value = sampling.min_keep, sampling.temperature
    match name:
        case "top_k" if sampling.top_k > 0:
            return partial(top_k, sampling.top_k)
        case "top_p" if sampling.top_p < 1:
            return partial(top_p, sampling.top_p, least)
        case "min_p" if sampling.min_p > 0:
            return partial(min_p, sampling.min_p, least)
        case "typ_p" if sampling.typical_p < 1:
            return partial(typical_p, sampling.typical_p, least)
        case "top_n_sigma" if sampling.top_n_sigma > 0:
            return partial(top_n_sigma, sampling.top_n_sigma)
        case "xtc" if sampling.xtc_probability > 0 and sampling.xtc_threshold <= 0.5:
            return partial(xtc, sampling.xtc_threshold, least)
        case "temperature" if sampling.dynatemp_range > 0 and not sampling.mirostat:
            spread, exponent = sampling.dynatemp_range, sampling.dynatemp_exponent
            return partial(dynamic_temperature, value, spread, exponent)
        case "temperature" if value != 1:
            return partial(temperature, value)
    return changes.get(name)


def _plain_end(steps: list[Step]) -> Plain:
    """Make the end, and remove the steps that it replaces: it applies a final temperature without
    another pass over the vocabulary, and nothing is cut if only the likeliest token is drawn."""
    for at, step in enumerate(steps):
        if _is(step, temperature) and step.args[0] < COLDEST:
            del steps[at:]
            while steps and _is(steps[-1], *_KEEP_THE_LIKELIEST):
                steps.pop()
            return Plain(0.0)
    if steps and _is(last := steps[-1], temperature):
        del steps[-1]
        return Plain(float(last.args[0]))
    return Plain(1.0)
