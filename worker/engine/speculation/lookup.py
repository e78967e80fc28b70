"""Guesses by lookup: what followed the same tokens before, in the conversation or in an earlier
answer. Engine thread.

An answer that a constraint holds to a form repeats itself in single tokens: each comma is followed
by the same line break and each key by the same colon, though the words around them are new. For
such an answer, the last token alone is looked up, too, and what the form forces after a guess, such
as the next key, is guessed with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from itertools import islice
from typing import NamedTuple

from worker.engine.sequence import Sequence
from worker.engine.speculation.speculation import Drafter, Guess
from worker.llama.constraint import Follower

N_GRAM = 3
_LENGTHS = (N_GRAM, 5, 8, 16)
"""The fewest equal tokens before a guess of each kind…"""
_TIMES = (1, 2, 5)
"""…how often in a row a token must have had the same successor, for the kinds of habits…"""
_ONCE = len(_LENGTHS)
_FORCED = _ONCE + len(_TIMES)
"""…and the kind of what a form forces."""
_BETWEEN, _FORCED_TEXT = -1, -2
"""In place of tokens: a separator of answers, and any text that a form has forced."""
Habits = dict[int, tuple[int, int]]
"""For a token, or `_FORCED_TEXT`: what followed it last, and how often in a row."""
_MOST_TENANTS, _MOST_KEPT = 8, 1 << 13
_MOST_INDEXED = 1 << 12
"""The most tokens that a step indexes, in some 2 ms: a long prompt is indexed over several steps,
the oldest tokens first."""


class Text:
    """Tokens, with an index of the place after the last occurrence of each n-gram."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._after: dict[tuple[int, ...], int] = {}
        self._n_indexed = 0
        self.habits: Habits = {}
        """The habits of the last answer that was held to a form."""

    @property
    def is_indexed(self) -> bool:
        return self._n_indexed == len(self.tokens)

    def index_more(self) -> None:
        """Index more tokens. The last n-gram is left out: nothing follows it yet."""
        tokens = self.tokens
        end = min(len(tokens), self._n_indexed + _MOST_INDEXED)
        first = max(self._n_indexed, N_GRAM)
        if end - first == 1:  # as after most steps
            self._after[tuple(tokens[first - N_GRAM : first])] = first
        elif end > first:
            columns = (islice(tokens, first - n, end - n) for n in range(N_GRAM, 0, -1))
            self._after.update(zip(zip(*columns, strict=True), range(first, end), strict=True))
        self._n_indexed = end

    def place(self, tail: list[int]) -> _Place | None:
        """The place after the last n-gram of `tail` in the text; `None` if the text lacks it."""
        at = self._after.get(tuple(tail[-N_GRAM:]))
        if at is None or self.tokens[at] == _BETWEEN:
            return None
        tokens, length = self.tokens, N_GRAM
        most = min(_LENGTHS[-1], at, len(tail))
        while length < most and tokens[at - 1 - length] == tail[-1 - length]:
            length += 1
        return _Place(self, at, length)


class Form:
    """The habits of an answer that a constraint holds to a form. They begin with the firm ones of
    the answer before it."""

    def __init__(self, sequence: Sequence, habits: Habits) -> None:
        self._tokens, self._n_learned = sequence.tokens, sequence.n_prompt
        self._n_prompt, self._forced = sequence.n_prompt, sequence.sampler.forced
        self.last = _BETWEEN
        self.habits = {last: habit for last, habit in habits.items() if habit[1] >= _TIMES[-1]}

    def learn(self) -> None:
        forced = self._forced[self._n_learned - self._n_prompt :]
        for token, is_forced in zip(self._tokens[self._n_learned :], forced, strict=False):
            if not is_forced:
                before, n_times = self.habits.get(self.last, (token, 0))
                self.habits[self.last] = token, n_times + 1 if before == token else 1
            self.last = _FORCED_TEXT if is_forced else token
        self._n_learned = len(self._tokens)

    def habit(self, last: int) -> Guess | None:
        """A guess of what follows `last`, a token or `_FORCED_TEXT`."""
        if (found := self.habits.get(last)) is None:
            return None
        token, n_times = found
        return Guess(token, _ONCE + sum(map(n_times.__ge__, _TIMES)) - 1)


class Lookup(Drafter):
    """Knows each running stream, and the last answers to the same tenant (`cache_salt`): the time
    saved by another tenant's answers would reveal them."""

    kinds: Rows[float] = (0.25, 0.4, 0.6, 0.85, 0.4, 0.85, 0.95, 0.98)
    computes = False

    def __init__(self, *, keeps: bool = True) -> None:
        """`keeps`: whether answers are kept for later streams."""
        self._keeps = keeps
        self._texts: dict[int, Text] = {}
        self._forms: dict[int, Form] = {}
        self._answers: OrderedDict[str | None, Text] = OrderedDict()

    def follow(self, sequence: Sequence) -> bool:
        text = self._texts.get(sequence.request_id)
        if text is None:
            text = self._texts[sequence.request_id] = Text(sequence.tokens)
        text.index_more()
        return True

    def forget(self, sequence: Sequence) -> None:
        form = self._forms.pop(sequence.request_id, None)
        if self._texts.pop(sequence.request_id, None) is None or not self._keeps:
            return
        salt = sequence.request.cache_salt
        answers = self._answers.pop(salt, None) or Text([])
        if len(answers.tokens) > _MOST_KEPT:
            habits, answers = answers.habits, Text(answers.tokens[-_MOST_KEPT // 2 :])
            answers.habits = habits
        answers.tokens += [*sequence.tokens[sequence.n_prompt :][-_MOST_KEPT:], _BETWEEN]
        while not answers.is_indexed:
            answers.index_more()
        if form is not None:
            answers.habits = form.habits
        self._answers[salt] = answers
        if len(self._answers) > _MOST_TENANTS:
            self._answers.popitem(last=False)

    def guess(self, sequence: Sequence, most: int) -> Iterator[Guess]:
        texts = [self._texts[sequence.request_id]]
        answers = self._answers.get(sequence.request.cache_salt)
        if answers is not None:
            texts.append(answers)
        tail = sequence.tokens[-_LENGTHS[-1] :]
        if (follower := sequence.sampler.ahead()) is None:
            return islice(_continued(texts, tail), most)
        form = self._forms.get(sequence.request_id)
        if form is None:
            habits = {} if answers is None else answers.habits
            form = self._forms[sequence.request_id] = Form(sequence, habits)
        form.learn()
        return islice(_in_form(form, follower, texts, tail), most)


class _Place(NamedTuple):
    """Where a text continues as a stream may, and how many tokens before that are equal."""

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


def _continued(texts: list[Text], tail: list[int]) -> Iterator[Guess]:
    place: _Place | None = None
    while (place := place or _found(texts, tail)) is not None:
        yield place.guess
        tail.append(place.guess.token)
        place = place.next


def _in_form(form: Form, follower: Follower, texts: list[Text], tail: list[int]) -> Iterator[Guess]:
    """Guesses that the form allows, and what it forces after each. `follower` is used up."""
    last = form.last
    place: _Place | None = None
    while True:
        place = place or _found(texts, tail)
        guesses = [form.habit(last), place and place.guess]
        if guesses[0] is not None and guesses[0].kind == _ONCE:  # not a habit yet
            guesses.reverse()
        guess = next((each for each in guesses if each and follower.take(each.token)), None)
        if guess is None:
            return
        yield guess
        tail.append(last := guess.token)
        place = place.next if place is not None and place.guess.token == guess.token else None
        for token in follower.forced():
            follower.take(token)
            yield Guess(token, _FORCED)
            tail.append(token)
            place, last = None, _FORCED_TEXT


def _found(texts: list[Text], tail: list[int]) -> _Place | None:
    for text in texts:
        if (place := text.place(tail)) is not None:
            return place
    return None
