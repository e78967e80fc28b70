"""The samplers that change logits: bias, and penalties and DRY, which depend on the text so far.

Each is a step of the chain. Penalties and DRY get every token by `remember`. Engine thread.
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
"""The natural logarithm of the largest number in single precision."""

_ENOUGH = 1000
"""The largest exponent if the base is almost 1: more would hardly change the power."""
_MOST_BREAKER_BYTES, _MOST_BREAKER_TOKENS = 40, 20

Breakers = Mapping[int, Sequence[tuple[int, ...]]]
"""The first token of each sequence breaker → the token sequences of which one must follow it."""


def _in_both(left: Indices, ids: Indices) -> tuple[Indices, Indices]:
    """The indices in `left` and in `ids` of the ids that are in both; neither has duplicates."""
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
        """Raises `InvalidRequest` if no token is left, which a retry cannot change."""
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
        text = prompt if last_n is None or last_n < 0 else prompt[max(len(prompt) - last_n, 0) :]
        # If `repeat_last_n` is not set, only the repetition penalty counts the prompt.
        counts = Counter(() if last_n is None and self._repetition == 1.0 else text)
        self._window = None if last_n is None or last_n < 0 else deque(text, last_n)
        self._row_of = {token: row for row, token in enumerate(counts)}
        n, room = len(counts), max(2 * len(counts), 64)
        self._ids = np.zeros(room, np.intp)
        self._count, self._repeats = np.zeros(room, np.float32), np.zeros(room, np.float32)
        """How often each token counts for frequency and presence, and for repetition."""
        self._ids[:n], self._repeats[:n] = [*counts], [*counts.values()]
        if last_n is not None:
            self._count[:n] = self._repeats[:n]

    def remember(self, token: int) -> None:
        if self._window is not None:
            if len(self._window) == self._window.maxlen:
                if not self._window:
                    return
                row = self._row_of[self._window[0]]
                self._repeats[row] -= 1
                self._count[row] -= 1
            self._window.append(token)
        row = self._row_of.setdefault(token, len(self._row_of))
        if row == len(self._ids):
            room = (0, row)  # as much again
            self._ids = np.pad(self._ids, room)
            self._count, self._repeats = np.pad(self._count, room), np.pad(self._repeats, room)
        self._ids[row] = token
        self._repeats[row] += 1
        self._count[row] += 1

    def __call__(self, kept: Kept) -> Kept:
        n = len(self._row_of)
        at, count, repeats = self._ids[:n], self._count[:n], self._repeats[:n]
        if kept.ids is not None:
            at, of = _in_both(kept.ids, at)
            count, repeats = count[of], repeats[of]
        values = kept.logits[at]
        if self._repetition != 1.0:
            penalised = np.where(values > 0, values / self._repetition, values * self._repetition)
            values = np.where(repeats > 0, penalised, values)
        if self._frequency or self._presence:
            values = values - (count * self._frequency + (count > 0) * self._presence)
        return self._undo.change(kept, at, values)


class Dry:
    """Don't Repeat Yourself: penalises the tokens that would continue a repetition, by its length
    (p-e-w, text-generation-webui 2024).

    A repetition never extends across a sequence breaker.
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
        """The largest exponent of the base: the power of a larger one would be infinite."""
        if self._base > 1.000001:
            self._most = int(_LARGEST_LOG / math.log(self._base)) or _ENOUGH
        self._is_head, self._is_breaker = np.zeros((2, n_vocab), np.bool_)
        self._is_head[[*breakers]] = True
        self._is_breaker[[token for token, rests in breakers.items() if () in rests]] = True
        self._text: npt.NDArray[np.int32] = np.array(prompt, np.int32)
        """Prompt and answer, of which the first `_n_tokens` are filled."""
        self._n_tokens = len(prompt)
        self._breaker = -1, 0
        """Where the last breaker begins, and where it ends."""
        self._look_for_breaker(0)
        self._lengths = self._match_lengths(self._start)
        """For each token of the text from `_start` on, how many tokens up to it equal those at the
        text's end."""

    @property
    def _start(self) -> int:
        return 0 if self._last_n < 0 else max(self._n_tokens - self._last_n, 0)

    def _match_lengths(self, start: int) -> npt.NDArray[np.int32]:
        """All `_lengths`, by Gusfield's Z algorithm on the reversed text: in linear time, however
        often the text repeats itself."""
        text = self._text[start:][::-1].tolist()
        found = [0] * len(text)
        begin = end = 0  # of the match with the text's beginning that reaches furthest
        for at in range(1, len(text)):
            length = min(end - at, found[at - begin]) if at < end else 0
            while at + length < len(text) and text[length] == text[at + length]:
                length += 1
            if at + length > end:
                begin, end = at, at + length
            found[at] = length
        return np.array([*[0] * start, *found[::-1]], np.int32)

    def remember(self, token: int) -> None:
        n = self._n_tokens
        if n == len(self._text):
            room = np.zeros(max(n, 256), np.int32)
            self._text = np.concatenate((self._text, room))
            self._lengths = np.concatenate((self._lengths, room))
        start = max(self._start, 1)
        lengths = self._lengths
        if n:
            longer = np.where(self._text[start:n] == token, lengths[start - 1 : n - 1] + 1, 0)
            lengths[start:n] = longer
            lengths[0] = self._text[0] == token
        self._text[n] = token
        self._n_tokens = n + 1
        self._look_for_breaker(max(n - _MOST_BREAKER_TOKENS, 0))

    def __call__(self, kept: Kept) -> Kept:
        ids, lengths = self._repetitions()
        if not len(ids):
            return kept
        exponents = np.minimum(lengths - self._allowed, self._most)
        added = (self._multiplier * self._base ** exponents.astype(np.float64)).astype(np.float32)
        at = ids
        if kept.ids is not None:
            at, of = _in_both(kept.ids, ids)
            added = added[of]
        return self._undo.change(kept, at, kept.logits[at] - added)

    def _repetitions(self) -> tuple[Indices, npt.NDArray[np.int32]]:
        """The tokens that would continue a repetition, and the length of the longest of each."""
        start, n = self._start, self._n_tokens
        none = np.array([], np.intp), np.array([], np.int32)
        if n - start <= self._allowed:
            return none
        begin, end = self._breaker
        most = n - (end if begin >= start else start)
        if most < self._allowed:
            return none
        # No repetition begins before the window or extends across a breaker.
        lengths = np.minimum(self._lengths[start : n - 1], np.arange(1, n - start))
        lengths = np.minimum(lengths, most)
        places = np.flatnonzero(lengths >= self._allowed)
        follows = self._text[start + 1 + places]
        ids, group = np.unique(follows, return_inverse=True)
        longest = np.zeros(len(ids), np.int32)
        np.maximum.at(longest, group, lengths[places].astype(np.int32))
        penalised = ~self._is_breaker[ids]
        return ids[penalised].astype(np.intp), longest[penalised]

    def _look_for_breaker(self, start: int) -> None:
        """Find the last breaker, unless it begins before `start`."""
        text = self._text[start : self._n_tokens]
        heads: list[int] = np.flatnonzero(self._is_head[text])[::-1].tolist()
        for at in heads:
            rests = self._breakers[int(text[at])]
            whole = [r for r in rests if tuple(text[at + 1 : at + 1 + len(r)].tolist()) == r]
            if whole:
                self._breaker = start + at, start + at + 1 + max(map(len, whole))
                return


# --- sequence breakers -----------------------------------------------------------------------


def breakers_of(model: Model, texts: Iterable[str]) -> Breakers:
    """The tokens with which one of these texts can begin, as llama.cpp finds them, and the tokens
    that complete it: none if the first token contains all of it. Texts are cut to 40 bytes. Any
    thread."""
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
