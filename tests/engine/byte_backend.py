"""A backend whose token is a byte: a model without weights for the loop and the scheduler.

It answers a prompt with a text that depends on every token of the prompt, so that a wrong cell, a
lost token or another sequence's text shows. It keeps the cells as llama.cpp does and refuses what
llama.cpp would refuse: a batch without room, with `recurrent` memory every cut that leaves a part
and has no snapshot, with a `window` one that needs cells which have given way. A batch that fails
leaves garbage behind until it is rolled back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from worker.engine.sequence import Sequence
from worker.engine.step import Chunk
from worker.llama.sampler import Sampler
from worker.wire.messages import DecodeOutcome, TokenLogprob
from worker.wire.work import InferenceRequest, Sampling

EOG = 256


def answer_byte(tokens: Rows[int]) -> int:
    """The token that follows `tokens`: a function of all of them. Rarely the end."""
    digest = hashlib.blake2b(b"".join(t.to_bytes(2, "big") for t in tokens), digest_size=2)
    value = int.from_bytes(digest.digest(), "big")
    return EOG if value % 97 == 0 else ord("a") + value % 26


def expected_answer(prompt: Rows[int], max_tokens: int, context_length: int) -> bytes:
    tokens = list(prompt)
    while True:
        token = answer_byte(tokens)
        if token == EOG:
            break
        tokens.append(token)
        if len(tokens) - len(prompt) >= max_tokens or len(tokens) > context_length:
            break
    return bytes(tokens[len(prompt) :])


GARBAGE = 257


class ByteSampler(Sampler):
    """Counts itself, and has nothing native to free."""

    def __init__(self, open_samplers: set[int]) -> None:
        self.open_samplers, self.closed = open_samplers, False
        self.open_samplers.add(id(self))

    def close(self) -> None:
        assert not self.closed, "a sampler is freed once"
        self.closed = True
        self.open_samplers.discard(id(self))


@dataclass
class ByteBackend:
    n_slots: int
    context_length: int
    n_cells: int
    batch: int
    recurrent: bool = False
    window: int = 0
    cells: dict[int, list[int]] = field(default_factory=dict)
    states: dict[int, list[int]] = field(default_factory=dict)
    """The tokens that a recurrent state has taken in; equal to the cells'."""
    longest: dict[int, int] = field(default_factory=dict)
    """How far each slot has been: what is more than a window behind it has given way."""
    outcomes: list[DecodeOutcome] = field(default_factory=list)
    """Outcomes to force, the next one first; `ok` when empty."""
    batches: list[list[tuple[int, int, int]]] = field(default_factory=list)
    """(request, start, tokens) of each computed batch."""
    samplers: set[int] = field(default_factory=set)
    _chunks: Rows[Chunk] = ()
    _draft: list[int] = field(default_factory=list)
    _sampled_from: list[list[int]] = field(default_factory=list)

    def sampler(self) -> ByteSampler:
        return ByteSampler(self.samplers)

    def fill(self, chunks: Rows[Chunk], draft: Rows[int] = ()) -> None:
        assert not draft or len(chunks) == 1, "one stream alone is guessed for"
        self._chunks, self._draft = tuple(chunks), list(draft)

    def decode(self) -> DecodeOutcome:
        chunks = self._chunks
        n_tokens = sum(chunk.n_tokens for chunk in chunks) + len(self._draft)
        assert 0 < n_tokens <= self.batch, "the batch fits its budget"
        slots = [chunk.sequence.slot for chunk in chunks]
        assert len(set(slots)) == len(slots), "a slot has one sequence"
        outcome = self.outcomes.pop(0) if self.outcomes else "ok"
        if outcome == "ok" and self.n_used + n_tokens > self.n_cells:
            outcome = "no_room"
        if outcome in ("aborted", "failed"):
            assert outcome == "failed" or not self.recurrent, "llama.cpp is not asked to abort it"
            for chunk in chunks:
                assert chunk.sequence.slot is not None
                cells = self.cells.setdefault(chunk.sequence.slot, [])
                cells.append(GARBAGE)
                self._extend(chunk.sequence.slot, cells)
        if outcome != "ok":
            return outcome
        self._sampled_from = []
        for chunk in chunks:
            slot = chunk.sequence.slot
            assert slot is not None
            cells = self.cells.setdefault(slot, [])
            assert len(cells) == chunk.start, "positions follow each other"
            cells += chunk.sequence.tokens[chunk.start : chunk.end]
            self._sampled_from.append(list(cells))
            for guess in self._draft:
                cells.append(guess)
                self._sampled_from.append(list(cells))
            assert len(cells) <= self.context_length
            self._extend(slot, cells)
        self.batches.append([(c.sequence.request_id, c.start, c.n_tokens) for c in chunks])
        return "ok"

    def sample(self, sampler: Sampler, chunk: int, guesses: int = 0) -> int:
        assert isinstance(sampler, ByteSampler) and not sampler.closed
        return answer_byte(self._sampled_from[chunk + guesses])

    def logprobs(self, chunk: int, token: int, n_top: int, before: int = 0) -> TokenLogprob:
        return TokenLogprob(token, self.piece(token), 0.0)

    def is_eog(self, token: int) -> bool:
        return token == EOG

    def piece(self, token: int, shown: tuple[str, ...] = ()) -> bytes:
        return bytes([token])

    @property
    def n_vocab(self) -> int:
        return EOG + 1

    @property
    def cuts_anywhere(self) -> bool:
        return not self.recurrent and not self.window

    @property
    def one_pass(self) -> bool:
        return False

    @property
    def copies_snapshots(self) -> bool:
        return not self.window

    def _extend(self, slot: int, cells: list[int]) -> None:
        self.states[slot] = list(cells)
        self.longest[slot] = max(self.longest.get(slot, 0), len(cells))

    def can_cut(self, slot: int, length: int) -> bool:
        if self.recurrent and length and length != len(self.states.get(slot, [])):
            return False
        if not self.window:
            return True
        first = max(self.longest.get(slot, 0) - self.window, 0)
        return first <= max(length - self.window, 0)

    def truncate(self, slot: int, length: int, snapshot: bytes | None = None) -> bool:
        cells = self.cells.get(slot, [])
        if snapshot is not None:
            state = [int.from_bytes(snapshot[i : i + 2], "big") for i in range(0, len(snapshot), 2)]
            assert len(state) == length, "a snapshot is of the tokens that are kept"
            assert state == cells[:length], "a snapshot's other cells stand"
            self.states[slot], self.longest[slot] = state, length
        if length and not self.can_cut(slot, length):
            return False
        cells = cells[:length]
        self.cells[slot], self.states[slot] = cells, list(cells)
        if not cells:
            self.longest[slot] = 0
        return True

    def copy(self, source: int, target: int, length: int, snapshot: bytes | None = None) -> bool:
        assert not self.cells.get(target), "a copy goes into an empty slot"
        assert len(self.cells[source]) >= length, "only computed cells are copied"
        assert snapshot is None or self.copies_snapshots
        self.cells[target] = list(self.cells[source])
        self.states[target] = list(self.states[source])
        self.longest[target] = self.longest[source]
        return self.truncate(target, length, snapshot)

    def snapshot(self, slot: int) -> bytes:
        return b"".join(token.to_bytes(2, "big") for token in self.cells[slot])

    def state_bytes(self, slot: int) -> int:
        return 2 * len(self.cells[slot])

    def state(self, slot: int, n_bytes: int) -> memoryview:
        assert n_bytes == self.state_bytes(slot)
        return memoryview(self.snapshot(slot))

    def restore(self, slot: int, state: memoryview) -> bool:
        assert not self.cells.get(slot), "a state goes into an empty slot"
        cells = [int.from_bytes(state[i : i + 2], "big") for i in range(0, len(state), 2)]
        if self.n_used + len(cells) > self.n_cells:
            return False
        self.cells[slot], self.longest[slot] = cells, 0
        self._extend(slot, cells)
        return True

    def abort(self) -> None: ...

    def resume(self) -> None: ...

    @property
    def n_used(self) -> int:
        return sum(len(cells) for cells in self.cells.values())


def make_sequence(
    backend: ByteBackend,
    request_id: int,
    prompt: bytes,
    *,
    max_tokens: int = 16,
    stop: tuple[str, ...] = (),
    cache_salt: str | None = None,
    deterministic: bool = False,
    deadline: float | None = None,
) -> Sequence:
    request = InferenceRequest(
        job_id=str(request_id),
        prompt=tuple(prompt),
        sampling=Sampling(seed=0, temperature=0.0),
        max_tokens=max_tokens,
        stop=stop,
        cache_salt=cache_salt,
        deterministic=deterministic,
        deadline=deadline,
    )
    return Sequence(request_id, request, list(prompt), backend.sampler())
