"""Speculation: guesses tokens of running streams, and verifies them together with their next ones.

If a pass over the weights takes longer than its rows, guessed tokens are added as rows of their
own. The token after each is drawn as it would be without guesses: from the model's own logits, by
the request's own random numbers. While the draws equal the guesses, a step brings more than one
token; after the first that differs, the rest is dropped. The answer changes by nothing but
rounding: rows that are computed together have other last bits. So nothing is guessed for a request
with a seed, which asks for the same text again.

The drafter makes the guesses (`lookup`, `draft`, `mtp`); how many are tried is decided here. They
are tried while their measured hits are worth their measured rows, and an account of wins and losses
bounds what all of them together can cost. Engine thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter, mul
from typing import NamedTuple, Protocol

from worker.engine.pace import Pace, moved
from worker.engine.sequence import Sequence
from worker.engine.step import Chunk

MOST_GUESSES = 31
"""The most guesses for a stream that runs alone…"""
_MOST_EACH = 7
"""…and for each of several: llama.cpp has room for the logits of eight rows of each."""
_NEWEST = 0.1
"""The weight of one guess in the mean acceptance of its stream."""
_NEWEST_OF_ALL = 0.02
"""The weight of one guess in the mean acceptance of all streams, where the next one begins."""
_MARGIN = 1.2
"""Guesses must be worth this many times their cost, because measurements are not exact."""
_MOST_ACCEPTANCE = 0.99
_STAKE = 0.005
"""The share of all time that guesses may lose for good, look-ups included."""
_RESTED = 0.5
"""Once the account was spent, guesses are made again when it has this many plain steps. Otherwise,
with steps of a millisecond, look-ups would use up all that the account gets, and few guesses would
be tried."""
_FORGET_STEPS = 32
"""After this many steps without guesses, the cost of their rows is forgotten a little."""
_FIRST_CREDIT, _MOST_CREDIT = 2, 32
"""What guesses may lose at first, in plain steps, and the largest win or loss that is remembered: a
process that was stopped for a minute says nothing about guesses."""


class Guess(NamedTuple):
    token: int
    kind: int
    """An index of the drafter's `kinds`."""


class Drafter(Protocol):
    """Guesses the next tokens of streams."""

    kinds: Rows[float]
    """For each kind of guess, the share that is expected to be right before any was seen."""
    computes: bool
    """Whether guesses are computed, for one stream at a time; otherwise they are looked up."""

    def follow(self, sequence: Sequence) -> bool:
        """Read the stream's tokens so far. Returns false while more are left than fit one step."""

    def guess(self, sequence: Sequence, most: int) -> Iterable[Guess]:
        """The tokens that may follow, at most `most`."""

    def read(self, sequence: Sequence, start: int, n_rows: int) -> None:
        """Read the first `n_rows` rows of the last pass, which was this sequence's alone: they have
        computed its tokens from `start` on. The other rows are of wrong guesses."""
        return

    def forget(self, sequence: Sequence) -> None:
        """The stream has ended."""
        return

    def use_threads(self, n_threads: int) -> None:
        """Compute on `n_threads` from now on."""
        return


@dataclass(slots=True)
class _Stream:
    """A stream that is guessed for."""

    acceptance: list[float]
    """The mean acceptance of each kind of guess."""
    untried: tuple[int, Guess] | None = None
    """A guess that was not tried, and the number of tokens before it."""


class Speculation:
    def __init__(
        self,
        drafter: Drafter,
        is_eog: Callable[[int], bool],
        pace: Pace,
        batch: int,
        clock: Callable[[], float],
        most_back: int = MOST_GUESSES,
    ) -> None:
        """`batch`: the most rows of one pass, including those of the streams' own tokens.
        `most_back`: the most guesses for a stream that can be taken back."""
        self._drafter, self._is_eog, self._pace, self._clock = drafter, is_eog, pace, clock
        self._batch, self._most_back = batch, most_back
        self._streams: dict[int, _Stream] = {}
        self._acceptance = list(drafter.kinds)
        """The mean acceptance of each kind of guess in all streams."""
        self._guess_cost = 0.0
        """The time to make a guess, as a share of a plain step."""
        self._account = float(_FIRST_CREDIT)
        """The plain steps that guesses have won, less those that they have lost."""
        self._rests = False
        """Whether the account was spent and has not reached `_RESTED` since."""
        self._tried: dict[int, list[Guess]] = {}
        """The guesses of this step, by request."""
        self._n_plain = 0
        """Steps without guesses."""
        self._n_streams, self._n_rows, self._plain = 1, 1, 0.0
        """The streams of this step, its rows before any guess (forced tokens are rows, too), and
        the seconds of a step with one row a stream."""
        self.n_drafted = self.n_accepted = 0
        """Tokens since the start."""
        self.seconds = 0.0
        """The time for which the drafter computed in the last step."""
        self.for_one = drafter.computes
        """Whether one stream at a time can be guessed for."""

    def drafts(self, chunks: Rows[Chunk]) -> dict[Sequence, list[int]]:
        """Guesses for what follows the chunks, which are computed in one pass: as many as are worth
        it, and none for a request that must not depend on them (`_may_guess`)."""
        self.seconds, self._tried = 0.0, {}
        self._n_streams, self._n_rows = len(chunks), sum([n for _, _, n in chunks])
        self._plain = self._pace.decode_seconds(self._n_streams)
        if not self._plain or (self.for_one and self._n_rows > 1):
            return {}
        self._book(_STAKE)
        most = MOST_GUESSES if self._n_streams == 1 else _MOST_EACH
        most = min(most, self._batch - self._n_rows, self._most_back)
        drafts = self._made(chunks, most) if self._may_try(most) else {}
        self._tried = {s.request_id: guesses for s, guesses in drafts.items() if guesses}
        if not self._tried:
            self._n_plain += 1
            if self._n_plain % _FORGET_STEPS == 0:
                self._pace.forget_beyond(self._n_rows)
        return {s: [g.token for g in guesses] for s, guesses in drafts.items() if guesses}

    def read(self, chunk: Chunk) -> float:
        """Let the drafter read what the last pass has computed, which had this chunk and its
        guesses alone. Returns the seconds that it took."""
        sequence, start, n_tokens = chunk
        if sequence.slot is None or not _may_guess(sequence):
            return 0.0
        began = self._clock()
        self._stream(sequence)  # so that `forget` reaches the drafter
        n_right = sequence.n_computed - start
        self._drafter.read(sequence, start, n_tokens + n_right)
        return self._clock() - began

    def verified(self, right: dict[int, int], seconds: float) -> None:
        """Record how many guesses of each draft were right."""
        n_right = sum(right.values())
        self.n_drafted += sum(map(len, self._tried.values()))
        self.n_accepted += n_right
        if self._n_rows == self._n_streams:
            more = max(seconds / self._plain - 1.0, 0.0)
        else:  # the rows of forced tokens have no logits, and their share of the time is unknown
            more = self._more(sum(map(len, self._tried.values())))
        for request_id, n in right.items():
            for index, guess in enumerate(self._tried[request_id][: n + 1]):
                self._learn(self._streams[request_id], guess.kind, index < n)
        self._book(n_right / self._n_streams - more)

    def forget(self, sequence: Sequence) -> None:
        if self._streams.pop(sequence.request_id, None) is not None:
            self._drafter.forget(sequence)

    # --- guesses -----------------------------------------------------------------------------

    def _stream(self, sequence: Sequence) -> _Stream:
        stream = self._streams.get(sequence.request_id)
        if stream is None:
            stream = self._streams[sequence.request_id] = _Stream(list(self._acceptance))
        return stream

    def _made(self, chunks: Rows[Chunk], most: int) -> dict[Sequence, list[Guess]]:
        """Guesses for the streams that may have some, at most `most` for each."""
        room = {}
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.end
            n = min(most, sequence.n_most - len(sequence.tokens) - 1)
            # A snapshot would include the guesses.
            is_last = end == len(sequence.tokens) and end not in sequence.snapshot_at
            if n > 0 and is_last and _may_guess(sequence):
                room[sequence] = n
        if self.for_one:
            return {s: self._computed(s, n) for s, n in room.items()}
        return self._looked_up(room)

    def _looked_up(self, room: dict[Sequence, int]) -> dict[Sequence, list[Guess]]:
        """The likeliest of all streams' guesses, as many as are worth it."""
        began = self._clock()
        found: dict[Sequence, list[Guess]] = {}
        rows: list[tuple[float, int]] = []  # the chance of each, and the request that it is for
        for sequence, most in room.items():
            stream = self._stream(sequence)
            if stream.untried is not None:
                at, guess = stream.untried
                if at < len(sequence.tokens):  # else the step has failed
                    self._learn(stream, guess.kind, sequence.tokens[at] == guess.token)
                stream.untried = None
            self._drafter.follow(sequence)
            guesses = found[sequence] = []
            chance, tokens = 1.0, 0.0
            for guess in self._drafter.guess(sequence, most):
                if self._is_eog(guess.token):  # nothing follows it
                    break
                guesses.append(guess)
                chance *= stream.acceptance[guess.kind]
                tokens += chance
                rows.append((chance, sequence.request_id))
                if not self._may_pay(len(guesses), tokens, chance, most):
                    break
        rows.sort(key=itemgetter(0), reverse=True)
        del rows[self._batch - self._n_rows :]  # all streams share the rows of a pass
        n_worth = self._worth([chance for chance, _ in rows])
        counts = Counter(request_id for _, request_id in rows[:n_worth])
        for sequence, guesses in found.items():
            count = counts[sequence.request_id]
            if guesses and not count:
                self._stream(sequence).untried = len(sequence.tokens), guesses[0]
            del guesses[count:]
        self._book((began - self._clock()) / self._plain)
        return found

    def _computed(self, sequence: Sequence, most: int) -> list[Guess]:
        stream = self._stream(sequence)
        n_worth = self._worth([*accumulate([stream.acceptance[0]] * most, mul)])
        if not n_worth and self._account < _FIRST_CREDIT:
            return []
        began = self._clock()
        is_ready = self._drafter.follow(sequence)
        followed = self._clock()
        guesses = list(self._drafter.guess(sequence, min(n_worth or 1, most))) if is_ready else []
        ends = [at for at, guess in enumerate(guesses) if self._is_eog(guess.token)]
        del guesses[min(ends, default=most) :]
        ended = self._clock()
        if guesses:
            cost = (ended - followed) / self._plain / len(guesses)
            weight = 2 * _NEWEST if self._guess_cost else 1.0
            self._guess_cost = moved(self._guess_cost, cost, weight)
        self.seconds = ended - began
        self._book((began - ended) / self._plain)
        return guesses

    # --- what they are worth -------------------------------------------------------------------

    def _book(self, won: float) -> None:
        self._account = max(min(self._account + won, _MOST_CREDIT), -_MOST_CREDIT)

    def _learn(self, stream: _Stream, kind: int, is_right: bool) -> None:
        for known, weight in ((stream.acceptance, _NEWEST), (self._acceptance, _NEWEST_OF_ALL)):
            known[kind] = min(moved(known[kind], is_right, weight), _MOST_ACCEPTANCE)

    def _more(self, count: int) -> float:
        """What `count` guesses add to this step, as a share of a plain one."""
        seconds = self._pace.decode_seconds
        return max(seconds(self._n_rows + count) - seconds(self._n_rows), 0.0) / self._plain

    def _may_try(self, most: int) -> bool:
        """Whether to make guesses in this step: not while the account is spent, nor where too many
        streams share a pass for any guess to be worth it."""
        if self._account < 0 or self._account >= _RESTED:
            self._rests = self._account < 0
        return not self._rests and (self._n_streams == 1 or self._may_pay(0, 0.0, 1.0, most))

    def _may_pay(self, n_guessed: int, tokens: float, chance: float, most: int) -> bool:
        """Whether further guesses for a stream would be worth it if all of them were right, after
        `n_guessed` that bring `tokens` and have a chance of `chance` to be all right."""
        return any(
            tokens + chance * (count - n_guessed) > _MARGIN * self._n_streams * self._more(count)
            for count in (n_guessed + 1, most)
        )

    def _worth(self, chances: list[float]) -> int:
        """The number of guesses that brings most tokens a second. Each of `chances`, the likeliest
        first, is that a guess and all before it in its stream are right. What may be lost, times
        its probability, must be on the account."""
        best, best_rate, tokens = 0, 1.0, 1.0
        for count, chance in enumerate(chances, 1):
            more = self._more(count) + self._guess_cost * count
            tokens += chance / self._n_streams
            if more * (1 - chances[0]) > self._account:
                break
            rate = tokens / (1 + _MARGIN * more)
            if rate > best_rate:
                best, best_rate = count, rate
        return best


def _may_guess(sequence: Sequence) -> bool:
    request = sequence.request
    sampling = request.sampling
    # Rows computed together round differently, and what is guessed depends on earlier requests.
    is_fixed = request.deterministic or sampling.is_seeded
    is_fixed = is_fixed or sampling.logprobs is not None or sampling.learns
    return not (is_fixed or sequence.spans)  # drafters know only tokens
