"""The samplers that change logits by what was said: bias, penalties and DRY.

Each is a step of the chain, and remembers the text: `remember` is told every token. Engine thread.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from worker.errors import InvalidRequest
from worker.llama.chain import Kept, Undo
from worker.llama.draw import Indices
from worker.llama.model import Model
from worker.wire.sampling import Sampling

_SMALLEST_REPETITION_PENALTY = 1e-2
"""Zero would divide logits by zero. At this value, a repeated token wins anyway."""
_LARGEST_LOG = 88.7228391
"""Of a number in single precision."""

_ENOUGH = 1000
"""Repetitions are not counted further, where their length has next to no effect."""
_MOST_BREAKER_BYTES, _MOST_BREAKER_TOKENS = 40, 20

Breakers = Mapping[int, Sequence[tuple[int, ...]]]
"""The first token of each sequence breaker → the tokens that must follow it, in one of these."""


def _found(left: Indices, ids: Indices) -> tuple[Indices, Indices]:
    """The ids that are left, by where they are in each; all ids are different."""
    _, at, of = np.intersect1d(left, ids, assume_unique=True, return_indices=True)
    return at, of


class Bias:
    """Adds to the logits of a few tokens."""

    def __init__(self, bias: Mapping[int, float], undo: Undo) -> None:
        self._undo = undo
        self._ids = np.array([*bias], np.intp)
        self._added = np.array([*bias.values()], np.float32)
        self._forbids = bool(np.isneginf(self._added).any())

    def __call__(self, kept: Kept) -> Kept:
        """Raises `InvalidRequest` if no token is left: none will be if it is tried again."""
        assert kept.ids is None, "bias is the first step"
        changed = self._undo.change(kept, self._ids, kept.logits[self._ids] + self._added)
        if self._forbids and changed.logits.max() == -np.inf:
            raise InvalidRequest.of_field("logit_bias", "forbids every token that may follow")
        return changed


class Penalties:
    """Repetition (Keskar et al. 2019), frequency and presence penalty."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], undo: Undo) -> None:
        self._undo = undo
        self._repetition = max(sampling.repetition_penalty, _SMALLEST_REPETITION_PENALTY)
        self._frequency, self._presence = sampling.frequency_penalty, sampling.presence_penalty
        last_n = sampling.repeat_last_n
        said = prompt if last_n is None or last_n < 0 else prompt[max(len(prompt) - last_n, 0) :]
        # Only the repetition penalty counts the prompt without a window.
        counts = Counter(() if last_n is None and self._repetition == 1.0 else said)
        self._window = None if last_n is None or last_n < 0 else deque(said, last_n)
        self._row_of = {token: row for row, token in enumerate(counts)}
        n, room = len(counts), max(2 * len(counts), 64)
        self._ids = np.zeros(room, np.intp)
        self._count, self._said = np.zeros(room, np.float32), np.zeros(room, np.float32)
        self._ids[:n], self._said[:n] = [*counts], [*counts.values()]
        if last_n is not None:
            self._count[:n] = self._said[:n]

    def remember(self, token: int) -> None:
        if self._window is not None:
            if len(self._window) == self._window.maxlen:
                if not self._window:
                    return
                row = self._row_of[self._window[0]]
                self._said[row] -= 1
                self._count[row] -= 1
            self._window.append(token)
        row = self._row_of.setdefault(token, len(self._row_of))
        if row == len(self._ids):
            room = (0, row)  # as much again
            self._ids = np.pad(self._ids, room)
            self._count, self._said = np.pad(self._count, room), np.pad(self._said, room)
        self._ids[row] = token
        self._said[row] += 1
        self._count[row] += 1

    def __call__(self, kept: Kept) -> Kept:
        n = len(self._row_of)
        at, count, said = self._ids[:n], self._count[:n], self._said[:n]
        if kept.ids is not None:
            at, of = _found(kept.ids, at)
            count, said = count[of], said[of]
        values = kept.logits[at]
        if self._repetition != 1.0:
            punished = np.where(values > 0, values / self._repetition, values * self._repetition)
            values = np.where(said > 0, punished, values)
        if self._frequency or self._presence:
            values = values - (count * self._frequency + (count > 0) * self._presence)
        return self._undo.change(kept, at, values)


class Dry:
    """Don't Repeat Yourself: punishes the tokens that would go on with a repetition, by its length
    (p-e-w, text-generation-webui 2024).

    A repetition does not go across a sequence breaker.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        breakers: Breakers,
        n_vocab: int,
        undo: Undo,
    ) -> None:
        self._undo, self._breakers = undo, breakers
        self._multiplier, self._base = sampling.dry_multiplier, sampling.dry_base
        self._allowed, self._last_n = sampling.dry_allowed_length, sampling.dry_penalty_last_n
        self._most = _ENOUGH
        """A longer repetition counts no more: its power would be infinite."""
        if self._base > 1.000001:
            self._most = int(_LARGEST_LOG / math.log(self._base)) or _ENOUGH
        self._is_head, self._is_breaker = np.zeros((2, n_vocab), np.bool_)
        self._is_head[[*breakers]] = True
        self._is_breaker[[token for token, rests in breakers.items() if () in rests]] = True
        self._said: npt.NDArray[np.int32] = np.array(prompt, np.int32)
        self._n_said = len(prompt)
        self._breaker = -1, 0
        """Where the last breaker begins, and where what follows it does."""
        self._look_for_breaker(0)
        self._lengths = self._repeated(self._start)
        """For each token of the text, how many tokens up to it are those at the text's end; from
        `_start` on."""

    @property
    def _start(self) -> int:
        return 0 if self._last_n < 0 else max(self._n_said - self._last_n, 0)

    def _repeated(self, start: int) -> npt.NDArray[np.int32]:
        """All lengths, by Gusfield's Z algorithm on the text read backwards: no token is compared
        often, however the text repeats itself."""
        text = self._said[start:][::-1].tolist()
        found = [0] * len(text)
        begin = end = 0  # of the stretch that is as the text begins, and reaches furthest
        for at in range(1, len(text)):
            length = min(end - at, found[at - begin]) if at < end else 0
            while at + length < len(text) and text[length] == text[at + length]:
                length += 1
            if at + length > end:
                begin, end = at, at + length
            found[at] = length
        return np.array([*[0] * start, *found[::-1]], np.int32)

    def remember(self, token: int) -> None:
        n = self._n_said
        if n == len(self._said):
            room = np.zeros(max(n, 256), np.int32)
            self._said = np.concatenate((self._said, room))
            self._lengths = np.concatenate((self._lengths, room))
        start = max(self._start, 1)
        lengths = self._lengths
        if n:
            longer = np.where(self._said[start:n] == token, lengths[start - 1 : n - 1] + 1, 0)
            lengths[start:n] = longer
            lengths[0] = self._said[0] == token
        self._said[n] = token
        self._n_said = n + 1
        self._look_for_breaker(max(n - _MOST_BREAKER_TOKENS, 0))

    def __call__(self, kept: Kept) -> Kept:
        ids, lengths = self._repetitions()
        if not len(ids):
            return kept
        exponents = np.minimum(lengths - self._allowed, self._most)
        added = (self._multiplier * self._base ** exponents.astype(np.float64)).astype(np.float32)
        at = ids
        if kept.ids is not None:
            at, of = _found(kept.ids, ids)
            added = added[of]
        return self._undo.change(kept, at, kept.logits[at] - added)

    def _repetitions(self) -> tuple[Indices, npt.NDArray[np.int32]]:
        """The tokens that would go on with a repetition, and the length of the longest of each."""
        start, n = self._start, self._n_said
        none = np.array([], np.intp), np.array([], np.int32)
        if n - start <= self._allowed:
            return none
        begin, end = self._breaker
        most = n - (end if begin >= start else start)
        if most < self._allowed:
            return none
        # No repetition begins before the window or goes across a breaker.
        lengths = np.minimum(self._lengths[start : n - 1], np.arange(1, n - start))
        lengths = np.minimum(lengths, most)
        places = np.flatnonzero(lengths >= self._allowed)
        follows = self._said[start + 1 + places]
        ids, group = np.unique(follows, return_inverse=True)
        longest = np.zeros(len(ids), np.int32)
        np.maximum.at(longest, group, lengths[places].astype(np.int32))
        punished = ~self._is_breaker[ids]
        return ids[punished].astype(np.intp), longest[punished]

    def _look_for_breaker(self, start: int) -> None:
        """Find the last breaker, unless it begins before `start`."""
        said = self._said[start : self._n_said]
        heads: list[int] = np.flatnonzero(self._is_head[said])[::-1].tolist()
        for at in heads:
            rests = self._breakers[int(said[at])]
            whole = [r for r in rests if tuple(said[at + 1 : at + 1 + len(r)].tolist()) == r]
            if whole:
                self._breaker = start + at, start + at + 1 + max(map(len, whole))
                return


# --- sequence breakers -----------------------------------------------------------------------


def breakers_of(model: Model, texts: Iterable[str]) -> Breakers:
    """The tokens with which a breaker of DRY may begin, as llama.cpp finds them, and what follows
    them: nothing if the token has all of it, else the tokens of the rest. A text longer than 40
    bytes is cut. Any thread."""
    found: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for text in filter(None, texts):
        for token, rest in _breakers_of(model, text.encode()[:_MOST_BREAKER_BYTES]):
            if rest not in found[token]:
                found[token].append(rest)
    return dict(found)


@lru_cache(maxsize=64)
def _breakers_of(model: Model, text: bytes) -> tuple[tuple[int, tuple[int, ...]], ...]:
    beginnings = tuple(text[:n] for n in range(1, len(text)))
    rests = {part: tuple(model.tokenize_bytes(text[len(part) :])) for part in beginnings}
    found: list[tuple[int, tuple[int, ...]]] = []
    for token, word in enumerate(_words(model)):
        if text in word:
            found.append((token, ()))
        elif beginnings and word.endswith(beginnings):
            found += [
                (token, rest[:_MOST_BREAKER_TOKENS])
                for part, rest in rests.items()
                if word.endswith(part)
            ]
    return tuple(found)


@lru_cache(maxsize=1)
def _words(model: Model) -> tuple[bytes, ...]:
    return tuple(model.words())
