"""Guesses by lookup: what followed the same tokens before, in the conversation or in an earlier
answer. Engine thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from itertools import islice
from typing import NamedTuple

from worker.engine.sequence import Sequence
from worker.engine.speculation import Drafter, Guess

N_GRAM = 3
_LENGTHS = (N_GRAM, 5, 8, 16)
"""The fewest equal tokens before a guess of each kind."""
_MOST_TENANTS, _MOST_KEPT = 8, 1 << 13
_TAKEN_IN = 1 << 12
"""Tokens that a step takes in at most, some 2 ms: a long prompt becomes known over some steps, the
oldest tokens first."""
_BETWEEN = -1
"""No token: stands between two answers."""


class Text:
    """Tokens, with the place behind the last occurrence of each n-gram."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._behind: dict[tuple[int, ...], int] = {}
        self._n_known = 0

    @property
    def is_known(self) -> bool:
        return self._n_known == len(self.tokens)

    def take_in(self) -> None:
        """Know more tokens, up to the last, behind which there is nothing yet."""
        tokens = self.tokens
        end = min(len(tokens), self._n_known + _TAKEN_IN)
        first = max(self._n_known, N_GRAM)
        if end - first == 1:  # as after most steps
            self._behind[tuple(tokens[first - N_GRAM : first])] = first
        elif end > first:
            columns = (islice(tokens, first - n, end - n) for n in range(N_GRAM, 0, -1))
            self._behind.update(zip(zip(*columns, strict=True), range(first, end), strict=True))
        self._n_known = end

    def place(self, said: list[int]) -> _Place | None:
        """Where the text may go on as what was said."""
        at = self._behind.get(tuple(said[-N_GRAM:]))
        if at is None or self.tokens[at] == _BETWEEN:
            return None
        tokens, length = self.tokens, N_GRAM
        most = min(_LENGTHS[-1], at, len(said))
        while length < most and tokens[at - 1 - length] == said[-1 - length]:
            length += 1
        return _Place(self, at, length)


class Lookup(Drafter):
    """Knows each running stream, and the last answers to the same tenant
    (`cache_salt`): the time that another one's would save would tell of it."""

    kinds: Rows[float] = (0.25, 0.4, 0.6, 0.85)
    computes = False

    def __init__(self, *, keeps: bool = True) -> None:
        """`keeps`: answers, for the streams after them."""
        self._keeps = keeps
        self._texts: dict[int, Text] = {}
        self._answers: OrderedDict[str | None, Text] = OrderedDict()

    def follow(self, sequence: Sequence) -> bool:
        text = self._texts.get(sequence.request_id)
        if text is None:
            text = self._texts[sequence.request_id] = Text(sequence.tokens)
        text.take_in()
        return True

    def forget(self, sequence: Sequence) -> None:
        if self._texts.pop(sequence.request_id, None) is None or not self._keeps:
            return
        salt = sequence.request.cache_salt
        answers = self._answers.pop(salt, None) or Text([])
        if len(answers.tokens) > _MOST_KEPT:
            answers = Text(answers.tokens[-_MOST_KEPT // 2 :])
        answers.tokens += [*sequence.tokens[sequence.n_prompt :][-_MOST_KEPT:], _BETWEEN]
        while not answers.is_known:
            answers.take_in()
        self._answers[salt] = answers
        if len(self._answers) > _MOST_TENANTS:
            self._answers.popitem(last=False)

    def guess(self, sequence: Sequence, most: int) -> Iterator[Guess]:
        texts = [self._texts[sequence.request_id]]
        if (answers := self._answers.get(sequence.request.cache_salt)) is not None:
            texts.append(answers)
        said = sequence.tokens[-_LENGTHS[-1] :]
        place: _Place | None = None
        for _ in range(most):
            place = place or _found(texts, said)
            if place is None:
                return
            yield place.guess
            said.append(place.guess.token)
            place = place.next


class _Place(NamedTuple):
    """Where a text goes on as a stream may, and how many tokens before are equal."""

    text: Text
    at: int
    length: int

    @property
    def guess(self) -> Guess:
        return Guess(self.text.tokens[self.at], sum(map(self.length.__ge__, _LENGTHS)) - 1)

    @property
    def next(self) -> _Place | None:
        at = self.at + 1
        tokens = self.text.tokens
        is_there = at < len(tokens) and tokens[at] != _BETWEEN
        return _Place(self.text, at, self.length + 1) if is_there else None


def _found(texts: list[Text], said: list[int]) -> _Place | None:
    for text in texts:
        if (place := text.place(said)) is not None:
            return place
    return None
