"""One step of the loop as a value: what happens to the cells, then one batch. Engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from worker.engine.sequence import Sequence


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence, one row each."""

    sequence: Sequence
    start: int
    n_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.n_tokens

    @property
    def wants_logits(self) -> bool:
        return self.end == len(self.sequence.tokens)


@dataclass(slots=True, eq=False)
class Snapshot:
    """What a sequence's memory held after `length` tokens, of what cannot be cut back to there:
    its recurrent state, or the cells of its windows. Good only while its other cells stand."""

    length: int
    state: bytes
    last_used: int = 0


class Truncate(NamedTuple):
    """Keep the first `length` tokens of a slot, with the help of a snapshot of them."""

    slot: int
    length: int
    snapshot: Snapshot | None = None


class Copy(NamedTuple):
    """Give the empty slot `target` the first `length` tokens of `source`, likewise."""

    source: int
    target: int
    length: int
    snapshot: Snapshot | None = None


class Restore(NamedTuple):
    """Put a stored state into the empty slot, then keep its first `length` tokens, likewise."""

    slot: int
    state: memoryview
    length: int
    snapshot: Snapshot | None = None


Move = Truncate | Copy | Restore


@dataclass(slots=True)
class Step:
    """The moves, in order, then the chunks as one batch."""

    moves: list[Move] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    """Sequences that got a slot."""
    draft: list[int] = field(default_factory=list)
    """Guessed tokens behind the only chunk, as rows of their own with logits."""


def main_prompt(chunks: list[Chunk]) -> int | None:
    """The request whose prompt is more than half of a batch."""
    sizes = [chunk.n_tokens for chunk in chunks]
    largest = max(sizes)
    if largest == 1 or 2 * largest <= sum(sizes):
        return None
    return chunks[sizes.index(largest)].sequence.request_id
