"""A runner whose tokens are bytes: a model without weights for the loop and the scheduler.

Its answer to a prompt depends on every token of the prompt, so that a wrong cell, a lost token or
another sequence's text is detected. It keeps cells as llama.cpp does: in one pool, slots share
copied cells; between the parts of a split pool, the next batch makes the copy. It refuses what
llama.cpp would refuse: a batch without room, with `recurrent` memory a partial cut without a
snapshot, with a `window` a cut that needs overwritten cells. A failed batch leaves garbage behind
until it is rolled back.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import defaultdict
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

from worker.engine.cache.moves import Divide
from worker.engine.media.span import Span
from worker.engine.model_runner import NO_DRAFTS, Drafts, ModelRunner
from worker.engine.sequence import Sequence
from worker.engine.step import Chunk
from worker.llama.memory_kind import MemoryKind
from worker.llama.sampler import Sampler
from worker.wire.adapters import Applied
from worker.wire.messages import DecodeOutcome, TokenLogprob
from worker.wire.sampling import Sampling
from worker.wire.work import InferenceRequest

EOG = 256


def under(adapters: Applied, tokens: Rows[int]) -> list[int]:
    """Return the cell contents of tokens that were computed with these adapters."""
    mark = zlib.crc32(repr(adapters).encode()) % 100 + 1 if adapters else 0
    return [token + 512 * mark for token in tokens]


def answer_byte(tokens: Rows[int]) -> int:
    """Return the token that follows the cells, a function of all of them; rarely the end."""
    digest = hashlib.blake2b(b"".join(t.to_bytes(2, "big") for t in tokens), digest_size=2)
    value = int.from_bytes(digest.digest(), "big")
    return EOG if value % 97 == 0 else ord("a") + value % 26


def expected_answer(
    prompt: Rows[int], max_tokens: int, context_length: int, adapters: Applied = ()
) -> bytes:
    tokens = list(prompt)
    while True:
        token = answer_byte(under(adapters, tokens))
        if token == EOG:
            break
        tokens.append(token)
        if len(tokens) - len(prompt) >= max_tokens or len(tokens) > context_length:
            break
    return bytes(tokens[len(prompt) :])


GARBAGE = 257


class ByteSampler(Sampler):
    """Like a constraint, it yields up to `most` forced tokens of the answer after a sampled one."""

    _may_force = False

    def __init__(self, most: int = 0) -> None:
        self.may_give, self._most = most > 0, most
        self.cells: list[int] = []
        """The cells from which the last token was drawn."""

    def take_given(self, most: int) -> list[int]:
        mark, guess = self.cells[-1] // 512 * 512, list[int]()
        cells = [*self.cells, answer_byte(self.cells) + mark]
        while len(guess) < sum(cells) % (self._most + 1) and (token := answer_byte(cells)) != EOG:
            guess.append(token)
            cells.append(token + mark)
        return guess[: max(most, 0)] if cells[len(self.cells)] % 512 != EOG else []


@dataclass
class ByteRunner(ModelRunner):
    n_slots: int
    context_length: int
    n_cells: int
    batch: int
    recurrent: bool = False
    most_back: int = 0
    """Number of tokens of the last batch that a recurrent memory can remove."""
    window: int = 0
    unified: bool = False
    contents: dict[int, int] = field(default_factory=dict)
    """The token in each cell. In a split pool the part of a slot begins at cell `slot * part`."""
    held: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The cells of each slot, in order."""
    states: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The tokens that a recurrent state or a window has consumed; equal to those of the cells."""
    longest: dict[int, int] = field(default_factory=dict)
    """The furthest position of each slot; cells more than a window before it are overwritten."""
    outcomes: list[DecodeOutcome] = field(default_factory=list)
    """Outcomes to force, in order; `ok` when empty."""
    batches: list[list[tuple[int, int, int]]] = field(default_factory=list)
    """(request, start, tokens) of each computed batch."""
    layouts: list[Divide] = field(default_factory=list)
    """Layouts to which the division of the cells was changed."""
    part: int = 0
    """The cells of one slot in a split pool."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pending copies between parts of a split pool, as (from, to), which the next batch makes."""
    _chunks: Rows[Chunk] = ()
    _drafts: Drafts = field(default_factory=dict)
    _sampled_from: list[list[list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.part = self.n_cells // self.n_slots
        kind = MemoryKind(recurrent=self.recurrent, window=self.window)
        if self.recurrent:
            kind = replace(kind, most_back=self.most_back)
        self.memory_kind = replace(kind, moves_states=kind.cuts_anywhere)
        self.rows_a_pass = self.batch
        self.cells = self  # type: ignore[assignment]

    def encode(self, span: Span, salt: str | None) -> bool:
        raise AssertionError("bytes have no media")

    def fill(self, chunks: Rows[Chunk], drafts: Drafts = NO_DRAFTS) -> None:
        assert not drafts or self.unified or len(chunks) == 1, "all rows are one pass"
        adapters = {chunk.sequence.request.adapters for chunk in chunks}
        assert len(adapters) == 1, "a batch has one set of adapters"
        self._chunks, self._drafts = tuple(chunks), drafts

    def decode(self) -> DecodeOutcome:
        self._make_copies()
        chunks = self._chunks
        n_tokens = sum(chunk.n_tokens for chunk in chunks) + sum(map(len, self._drafts.values()))
        assert 0 < n_tokens <= self.batch, "the batch fits its budget"
        slots = [chunk.sequence.slot for chunk in chunks]
        assert len(set(slots)) == len(slots), "a slot has one sequence"
        outcome = self.outcomes.pop(0) if self.outcomes else "ok"
        if outcome == "ok" and self.unified and self.n_used + n_tokens > self.n_cells:
            outcome = "no_room"
        if outcome in ("aborted", "failed"):
            assert outcome == "failed" or not self.recurrent, "llama.cpp is not asked to abort it"
            for chunk in chunks:
                assert chunk.sequence.slot is not None
                if self.n_used < self.n_cells:
                    self._extend(chunk.sequence.slot, [GARBAGE])
        if outcome != "ok":
            return outcome
        self._sampled_from = []
        for chunk in chunks:
            sequence, slot = chunk.sequence, chunk.sequence.slot
            assert slot is not None
            assert len(self.held[slot]) == chunk.start, "positions follow each other"
            if not self.memory_kind.cuts_anywhere:
                assert self.states[slot] == self.tokens_of(slot), "a state is of its cells"
            adapters = sequence.request.adapters
            self._extend(slot, under(adapters, sequence.tokens[chunk.start : chunk.end]))
            self._sampled_from.append([self.tokens_of(slot)])
            for guess in self._drafts.get(sequence, ()):
                self._extend(slot, under(adapters, [guess]))
                self._sampled_from[-1].append(self.tokens_of(slot))
            assert self.unified or len(self.held[slot]) <= self.part
        self.batches.append([(c.sequence.request_id, c.start, c.n_tokens) for c in chunks])
        return "ok"

    def sample(self, sampler: Sampler, chunk: int, guesses: int = 0) -> int:
        assert isinstance(sampler, ByteSampler)
        sampler.cells = self._sampled_from[chunk][guesses]
        return answer_byte(sampler.cells)

    def logprobs(self, chunk: int, token: int, n_top: int, before: int = 0) -> TokenLogprob:
        return TokenLogprob(token, self.piece(token), 0.0)

    def scored(self, token: int, logprob: float, top: Any) -> TokenLogprob:
        return TokenLogprob(token, self.piece(token), logprob)

    def is_eog(self, token: int) -> bool:
        return token == EOG

    def piece(self, token: int, shown: tuple[str, ...] = ()) -> bytes:
        return bytes([token])

    def first_position(self, slot: int) -> int:
        if not self.held[slot]:
            return -1
        return max(self.longest.get(slot, 0) - self.window, 0) if self.window else 0

    def last_position(self, slot: int) -> int:
        return len(self.held[slot]) - 1

    def tokens_of(self, slot: int) -> list[int]:
        return [self.contents[cell] for cell in self.held[slot]]

    def truncate(
        self, slot: int, length: int, snapshot: bytes | None = None, *, is_recent: bool = False
    ) -> bool:
        if is_recent:
            return self._take_back(slot, length)
        if snapshot is not None:
            state = _tokens(snapshot)
            assert len(state) == length, "a snapshot is of the tokens that are kept"
            self.states[slot], self.longest[slot] = state, length
        if length and not self._can_cut(slot, length):
            return False
        self.held[slot] = self.held[slot][:length]
        self.states[slot] = self.states[slot][:length]
        if not length:
            self.longest[slot] = 0
        return True

    def _take_back(self, slot: int, length: int) -> bool:
        start = next(c.start for c in self._chunks if c.sequence.slot == slot)
        if self.recurrent and len(self.held[slot]) - length > self.memory_kind.most_back:
            return False
        assert length > start, "the newest is of the last batch"
        del self.held[slot][length:], self.states[slot][length:]
        self.longest[slot] = min(self.longest[slot], start + 1)
        return True

    def copy(self, source: int, target: int, length: int, snapshot: bytes | None = None) -> bool:
        assert not self.held[target], "a copy goes into an empty slot"
        assert len(self.held[source]) >= length, "only computed cells are copied"
        if snapshot is not None and self.window and not self.unified:  # through a state
            restored = self.restore(
                target, memoryview(self.state(source, self.state_bytes(source)))
            )
            return restored and self.truncate(target, length, snapshot)
        cells = self.held[source]
        if not self.unified:
            self.copies.append((source, target))
            cells = [target * self.part + at for at in range(len(cells))]
        self.held[target] = list(cells)
        self.states[target] = list(self.states[source])
        self.longest[target] = self.longest.get(source, 0)
        return self.truncate(target, length, snapshot)

    def snapshot(self, slot: int) -> bytes:
        return _bytes(self.states[slot])

    def state_bytes(self, slot: int) -> int:
        return 2 * len(self.held[slot])

    def state(self, slot: int, n_bytes: int) -> memoryview:
        assert n_bytes == self.state_bytes(slot)
        assert slot not in [target for _, target in self.copies], "it is copied only later"
        return memoryview(_bytes(self.tokens_of(slot)))

    def restore(self, slot: int, state: memoryview) -> bool:
        assert not self.held[slot], "a state goes into an empty slot"
        assert slot not in [each for copy in self.copies for each in copy], (
            "it is copied only later"
        )
        tokens = _tokens(state)
        n_free = self.n_cells - self.n_used if self.unified else self.part
        if len(tokens) > n_free:
            return False
        self.longest[slot] = 0
        self._extend(slot, tokens)
        return True

    def divide(self, n_cells: int, n_slots: int, unified: bool) -> None:
        assert not self.copies, "a copy that waits would be lost"
        self.n_slots, self.n_cells, self.unified = n_slots, n_cells, unified
        self.part = n_cells // (1 if unified else n_slots)
        for each in (self.contents, self.held, self.states, self.longest):
            each.clear()
        self.layouts.append(Divide(n_cells, n_slots, unified))

    def abort(self) -> None: ...

    @property
    def n_used(self) -> int:
        return len({cell for cells in self.held.values() for cell in cells})

    def _can_cut(self, slot: int, length: int) -> bool:
        if self.recurrent and length != len(self.states[slot]):
            return False
        return not self.window or self.first_position(slot) <= max(length - self.window, 0)

    def _extend(self, slot: int, tokens: list[int]) -> None:
        held = self.held[slot]
        begin = slot * self.part + len(held)
        cells = list(range(begin, begin + len(tokens)))
        if self.unified:
            used = {cell for each in self.held.values() for cell in each}
            cells = list(islice((cell for cell in count() if cell not in used), len(tokens)))
        self.contents.update(zip(cells, tokens, strict=True))
        held += cells
        self.states[slot] = [*self.states[slot], *tokens]
        self.longest[slot] = max(self.longest.get(slot, 0), len(held))

    def _make_copies(self) -> None:
        for source, target in self.copies:
            for at in range(self.part):
                cell = source * self.part + at
                if cell in self.contents:
                    self.contents[target * self.part + at] = self.contents[cell]
        self.copies.clear()


def _bytes(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(2, "big") for token in tokens)


def _tokens(content: bytes | memoryview) -> list[int]:
    return [int.from_bytes(content[i : i + 2], "big") for i in range(0, len(content), 2)]


def make_sequence(
    request_id: int,
    prompt: bytes,
    *,
    max_tokens: int = 16,
    stop: tuple[str, ...] = (),
    cache_salt: str | None = None,
    adapters: Applied = (),
    deterministic: bool = False,
    is_seeded: bool = False,
    deadline: float | None = None,
    produced: tuple[int, ...] = (),
    sent_chars: int = 0,
    min_tokens: int = 0,
    most_given: int = 0,
    reports_progress: bool = False,
    logprobs: int | None = None,
) -> Sequence:
    request = InferenceRequest(
        job_id=str(request_id),
        prompt=tuple(prompt),
        sampling=Sampling(
            seed=0,
            temperature=0.0,
            is_seeded=is_seeded,
            min_tokens=min_tokens,
            logprobs=logprobs,
        ),
        max_tokens=max_tokens,
        stop=stop,
        cache_salt=cache_salt,
        adapters=adapters,
        deterministic=deterministic,
        deadline=deadline,
        produced=produced,
        sent_chars=sent_chars,
        reports_progress=reports_progress,
    )
    return Sequence(request_id, request, list(prompt), ByteSampler(most_given))
