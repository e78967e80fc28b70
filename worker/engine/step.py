"""One step of the loop as a value: changes of the cells, then one batch. Engine thread."""

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


@dataclass(slots=True, eq=False)
class Snapshot:
    """The part of a sequence's memory after `length` tokens that cannot be cut to that length
    later: its recurrent state or the cells of its windows. It is valid only while its other cells
    exist."""

    length: int
    state: bytes
    last_used: int = 0


class Truncate(NamedTuple):
    """Keep the first `length` tokens of a slot, with a snapshot of that length if needed."""

    slot: int
    length: int
    snapshot: Snapshot | None = None


class Copy(NamedTuple):
    """Copy the first `length` tokens of `source` to the empty slot `target`, likewise."""

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
    """The moves, in order, followed by the chunks as one batch."""

    moves: list[Move] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    """Sequences that got a slot in this step."""
    draft: list[int] = field(default_factory=list)
    """Guessed tokens after the only chunk, each a row with logits."""
    tells_of_prompts: bool = False
    """Whether some chunks are parts of prompts whose progress or log-probabilities are wanted."""

    @property
    def restores(self) -> bool:
        """Whether a stored state is put into a slot."""
        return any(isinstance(move, Restore) for move in self.moves)


def main_prompt(chunks: list[Chunk]) -> int | None:
    """The request whose prompt is more than half of the batch, if there is one."""
    sizes = [chunk.n_tokens for chunk in chunks]
    largest = max(sizes)
    if largest == 1 or 2 * largest <= sum(sizes):
        return None
    return chunks[sizes.index(largest)].sequence.request_id
