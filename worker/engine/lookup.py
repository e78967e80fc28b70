"""Guesses by lookup: what followed the same tokens before, in the conversation or in an earlier
answer. Engine thread.

Under a constraint, what it forces is known without a guess, and where it allows only a few tokens,
the one that was said last is guessed: so guesses go on from one key of a schema to the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from itertools import islice
from typing import NamedTuple

from worker.engine.sequence import Sequence
from worker.engine.speculation import Guess
from worker.llama.constraint import Follower

N_GRAM = 3
_LENGTHS = (N_GRAM, 5, 8, 16)
"""The fewest equal tokens before a guess of each kind."""
_BEHIND_ONE, _OF_A_FEW, _FORCED = range(len(_LENGTHS), len(_LENGTHS) + 3)
_FEW = 8
_MOST_TENANTS, _MOST_KEPT = 8, 1 << 15
_BETWEEN = -1
"""No token: stands between two answers."""


class Text:
    """Tokens, with the place behind the last occurrence of each n-gram, and of each token of
    answers."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.behind: dict[int, int] = {}
        self._behind_grams: dict[tuple[int, ...], int] = {}
        self._n_known = 0

    def take_in(self, n_prompt: int = 0) -> None:
        """Know all tokens up to the last, behind which there is nothing yet."""
        tokens, end = self.tokens, len(self.tokens)
        first = max(self._n_known, N_GRAM)
        if end - first == 1:  # as after most steps
            self._behind_grams[tuple(tokens[first - N_GRAM : first])] = first
        elif end > first:
            columns = (islice(tokens, first - n, end - n) for n in range(N_GRAM, 0, -1))
            self._behind_grams.update(
                zip(zip(*columns, strict=True), range(first, end), strict=True)
            )
        for at in range(max(self._n_known, n_prompt + 1), end):
            self.behind[tokens[at - 1]] = at
        self._n_known = end

    def place(self, said: list[int]) -> _Place | None:
        """Where the text may go on as what was said."""
        at = self._behind_grams.get(tuple(said[-N_GRAM:]))
        if at is None or self.tokens[at] == _BETWEEN:
            return None
        tokens, length = self.tokens, N_GRAM
        most = min(_LENGTHS[-1], at, len(said))
        while length < most and tokens[at - 1 - length] == said[-1 - length]:
            length += 1
        return _Place(self, at, length)


class Lookup:
    """A `Drafter` that knows each running stream, and the last answers to the same tenant
    (`cache_salt`): the time that another one's would save would tell of it."""

    kinds: Rows[float] = (0.25, 0.4, 0.6, 0.85, 0.4, 0.7, 0.98)
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
        text.take_in(sequence.n_prompt)
        return True

    def forget(self, sequence: Sequence) -> None:
        if self._texts.pop(sequence.request_id, None) is None or not self._keeps:
            return
        salt = sequence.request.cache_salt
        answers = self._answers.pop(salt, None) or Text([])
        if len(answers.tokens) > _MOST_KEPT:
            answers = Text(answers.tokens[-_MOST_KEPT // 2 :])
        answers.tokens += [*sequence.tokens[sequence.n_prompt :][-_MOST_KEPT:], _BETWEEN]
        answers.take_in()
        self._answers[salt] = answers
        if len(self._answers) > _MOST_TENANTS:
            self._answers.popitem(last=False)

    def guess(self, sequence: Sequence, most: int) -> Iterator[Guess]:
        texts = [self._texts[sequence.request_id]]
        if (answers := self._answers.get(sequence.request.cache_salt)) is not None:
            texts.append(answers)
        said = sequence.tokens[-_LENGTHS[-1] :]
        trial = sequence.sampler.trial()
        place: _Place | None = None
        n_guessed = 0
        while n_guessed < most:
            # At first, what is forced has been given.
            forced = trial.forced() if trial is not None and n_guessed else []
            if trial is not None and forced:
                more = [Guess(token, _FORCED, is_forced=True) for token in forced]
                if not all(map(trial.take, forced)):
                    return
                place = None
            else:
                place = place or _found(texts, said)
                possible = _possible(texts, place, said, trial)
                guess = next((g for g in possible if trial is None or trial.take(g.token)), None)
                if guess is None:
                    return
                place = place.next if place is not None and guess == place.guess else None
                more = [guess]
            more = more[: most - n_guessed]
            n_guessed += len(more)
            said += [guess.token for guess in more]
            yield from more


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


def _possible(
    texts: list[Text], place: _Place | None, said: list[int], trial: Follower | None
) -> Iterator[Guess]:
    """What the place says; under a constraint also what came behind the last token before, and the
    one of a few allowed tokens that was said last."""
    if place is not None:
        yield place.guess
    if trial is None:
        return
    for text in texts:
        at = text.behind.get(said[-1])
        if at is not None and text.tokens[at] != _BETWEEN:
            yield Guess(text.tokens[at], _BEHIND_ONE)
            break
    allowed = trial.few(_FEW)
    for text in texts:
        if known := [token for token in allowed if token in text.behind]:
            yield Guess(max(known, key=text.behind.__getitem__), _OF_A_FEW)
            break
