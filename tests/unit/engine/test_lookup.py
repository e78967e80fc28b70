"""Guesses by lookup against a plain implementation of their rule, which searches everything
again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.byte_runner import make_sequence
from worker.engine.sequence import Sequence
from worker.engine.speculation.lookup import Lookup
from worker.engine.speculation.speculation import Guess

END = -1
"""Marks the end of each earlier answer."""
WORDS = st.lists(st.integers(0, 2), max_size=40)
FORMS = st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30)
"""Tokens, and whether the constraint forced each."""


def kind_of(length: int) -> int:
    """Return 0 from 3 equal tokens on, then 1 from 5, 2 from 8 and 3 from 16."""
    return sum(length >= least for least in (5, 8, 16))


def answered(lookup: Lookup, sequence: Sequence) -> None:
    lookup.follow(sequence)
    lookup.forget(sequence)


def continuation(texts: list[list[int]], written: list[int], most: int) -> list[Guess]:
    """Return what followed the last occurrence of the last three tokens; while the guesses continue
    a text, the position moves along in it."""
    written, guesses = written[-16:], list[Guess]()
    text, at, length = list[int](), 0, 0
    while len(guesses) < most:
        if at == len(text) or text[at] == END:
            for text in texts:
                places = [i for i in range(3, len(text)) if text[i - 3 : i] == written[-3:]]
                if places and text[places[-1]] != END:
                    break
            else:
                break
            at = places[-1]
            equal = [n for n in range(3, 17) if n <= at and text[at - n : at] == written[-n:]]
            length = max(equal)
        guesses.append(Guess(text[at], kind_of(length)))
        written.append(text[at])
        at, length = at + 1, length + 1
    return guesses


@settings(max_examples=200, deadline=None)
@given(st.lists(WORDS, max_size=3), WORDS, WORDS, st.integers(1, 31))
@example([[0, 1, 2, 0]], [], [0, 1, 2], 5)
@example([list(range(20))], [], list(range(17)), 2)
def test_guesses_continue_after_the_last_equal_tokens(
    earlier: list[list[int]], prompt: list[int], answer: list[int], most: int
) -> None:
    lookup, kept = Lookup(), list[int]()
    for request_id, words in enumerate(earlier):
        answered(lookup, sequence_of(request_id, [], words))
        kept += [*words, END]
    sequence = sequence_of(99, prompt, answer)
    lookup.follow(sequence)
    expected = continuation([sequence.tokens, kept], sequence.tokens, most)
    assert list(lookup.guess(sequence, most)) == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=12))
def test_guesses_do_not_depend_on_how_often_a_text_was_read(
    pieces: list[tuple[int, int]],
) -> None:
    sequence, lookup = make_sequence(1, b"?"), Lookup()
    for n_tokens, token in pieces:
        sequence.tokens += [token] * n_tokens
        lookup.follow(sequence)
    at_once = Lookup()
    at_once.follow(sequence)
    assert list(lookup.guess(sequence, 9)) == list(at_once.guess(sequence, 9))


class Free:
    """A constraint's follower that allows some tokens, and forces others after some of them."""

    def __init__(self, allowed: set[int], forced: dict[int, list[int]]) -> None:
        self._allowed, self._forced, self._due = allowed, forced, list[int]()

    def take(self, token: int) -> bool:
        if self._due:
            return token == self._due.pop(0)
        if token in self._allowed:
            self._due = list(self._forced.get(token, ()))
        return token in self._allowed

    def forced(self) -> list[int]:
        return list(self._due)


class Sampler:
    """The sampler of a constrained answer."""

    def __init__(self, allowed: set[int], forced: dict[int, list[int]]) -> None:
        self.forced = bytearray()
        self._args = allowed, forced

    def ahead(self) -> Free:
        return Free(*self._args)


def sequence_of(request_id: int, prompt: list[int], answer: list[int]) -> Sequence:
    sequence = make_sequence(request_id, bytes(prompt))
    sequence.tokens += answer
    return sequence


Form = list[tuple[int, bool]]


def constrained(
    request_id: int, prompt: list[int], allowed: set[int], forced: dict[int, list[int]]
) -> Sequence:
    sequence = sequence_of(request_id, prompt, [])
    cast(Any, sequence).sampler = Sampler(allowed, forced)
    return sequence


def extend(sequence: Sequence, tokens: Form) -> None:
    sequence.tokens += [token for token, _ in tokens]
    sequence.sampler.forced += bytes(is_forced for _, is_forced in tokens)


def habits(tokens: Form, before: dict[object, list[int]]) -> dict[object, list[int]]:
    """Return, for each token and for any forced text (`None`), what followed so far; END is the
    beginning."""
    found = {last: list(then) for last, then in before.items()}
    last: object = END
    for token, is_forced in tokens:
        if not is_forced:
            found.setdefault(last, []).append(token)
        last = None if is_forced else token
    return found


def n_repeated(then: list[int]) -> int:
    return next((n for n, token in enumerate(reversed(then)) if token != then[-1]), len(then))


def constrained_guesses(
    prompt: list[int],
    tokens: Form,
    found: dict[object, list[int]],
    texts: list[list[int]],
    follower: Free,
) -> Iterator[Guess]:
    """A habit seen twice in a row precedes the text's continuation, which precedes one seen once;
    guesses that the constraint refuses do not count, and each guess is followed by what it
    forces."""
    words = [*prompt, *(token for token, _ in tokens)]
    last: object = END
    if tokens:
        last = None if tokens[-1][1] else words[-1]
    text_at: list[int] = []  # the text's continuation, while the guesses follow it
    while True:
        text_at = text_at or [guess.token for guess in continuation(texts, words, 64)]
        n_times = n_repeated(found[last]) if last in found else 0
        by_habit = [(found[last][-1], n_times)] if n_times else []
        by_text = [(text_at[0], 0)] if text_at else []
        wanted = by_habit + by_text if n_times > 1 else by_text + by_habit
        token, n = next(((t, n) for t, n in wanted if follower.take(t)), (None, 0))
        if token is None:
            return
        yield Guess(token, -1 if not n else 4 + (n >= 2) + (n >= 5))
        words.append(token)
        text_at = text_at[1:] if text_at and text_at[0] == token else []
        last = token
        for more in follower.forced():
            follower.take(more)
            yield Guess(more, 7)
            words.append(more)
            text_at, last = [], None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(FORMS, max_size=2),
    st.lists(st.integers(0, 2), max_size=4),
    FORMS,
    st.sets(st.integers(0, 2)),
    st.dictionaries(st.integers(0, 2), st.lists(st.integers(0, 2), max_size=3)),
    st.integers(0, 30),
)
@example([[(1, False), (2, False)] * 6], [], [(1, False)], {1, 2}, {}, 0)
@example([[(1, False), (2, False)] * 4], [], [(1, False)], {1, 2}, {}, 0)
@example([], [7], [(1, False), (2, True)] * 3, {1, 2}, {1: [2]}, 3)
def test_constrained_guesses_follow_habits_and_forced_tokens(
    earlier: list[Form],
    prompt: list[int],
    tokens: Form,
    allowed: set[int],
    forced: dict[int, list[int]],
    looked_at: int,
) -> None:
    lookup, kept = Lookup(), list[int]()
    before: dict[object, list[int]] = {}

    def guesses(sequence: Sequence) -> list[Guess]:
        lookup.follow(sequence)
        return list(lookup.guess(sequence, 20))

    for request_id, each in enumerate(earlier):
        sequence = constrained(request_id, [], allowed, forced)
        extend(sequence, each)
        guesses(sequence)
        lookup.forget(sequence)
        kept += [*sequence.tokens, END]
        found = habits(each, before)
        # A continuation seen five times in a row is kept for the next answer.
        before = {last: then for last, then in found.items() if n_repeated(then) >= 5}
    sequence = constrained(99, prompt, allowed, forced)
    extend(sequence, tokens[:looked_at])
    guesses(sequence)  # looking up changes nothing
    extend(sequence, tokens[looked_at:])
    texts, free = [sequence.tokens, kept], Free(allowed, forced)
    expected = list(
        islice(constrained_guesses(prompt, tokens, habits(tokens, before), texts, free), 20)
    )
    made = guesses(sequence)
    assert [guess.token for guess in made] == [guess.token for guess in expected]
    for guess, wanted in zip(made, expected, strict=True):
        assert guess.kind == wanted.kind or (wanted.kind == -1 and guess.kind < 4)


def test_the_oldest_of_many_answers_are_forgotten() -> None:
    lookup = Lookup()
    answers = [list(range(at, at + 4000)) for at in range(0, 20_000, 4000)]
    for request_id, answer in enumerate(answers):
        answered(lookup, sequence_of(request_id, [], answer))
    found = []
    for answer in answers:
        sequence = sequence_of(99, [], answer[:5])
        lookup.follow(sequence)
        found.append([guess.token for guess in lookup.guess(sequence, 9)] == answer[5:14])
        del lookup._texts[99]
    assert found == [False, False, True, True, True]


def test_the_least_recently_served_tenant_is_forgotten() -> None:
    """No tenant gets another one's text."""
    lookup = Lookup()

    def serve(tenant: str) -> list[int]:
        sequence = make_sequence(1, bytes([1, 2, 3]), cache_salt=tenant)
        lookup.follow(sequence)
        guesses = [guess.token for guess in lookup.guess(sequence, 9)]
        sequence.tokens += [1, 2, 3, 4]
        lookup.forget(sequence)
        return guesses

    for tenant in "abcdefgha":
        serve(tenant)
    assert serve("a") == [4] and serve("i") == []
    assert serve("a") == [4] and serve("b") == [], "it was the first of nine, but for a"
    assert not lookup._texts, "all have ended"


def test_an_answer_that_is_not_kept_is_not_looked_up() -> None:
    lookup = Lookup(keeps=False)
    answered(lookup, sequence_of(1, [], [1, 2, 3, 4]))
    second = sequence_of(2, [], [1, 2, 3])
    lookup.follow(second)
    assert list(lookup.guess(second, 5)) == []
