"""One step of the loop as a value: changes of the cells, then one batch. Engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from worker.engine.cache.moves import Move
from worker.engine.media.span import Span
from worker.engine.sequence import Sequence


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence, one row each."""

    sequence: Sequence
    start: int
    n_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.n_tokens


@dataclass(slots=True)
class Step:
    """The moves, in order, followed by the chunks as one batch. All chunks have the same
    adapters."""

    moves: list[Move] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    """Sequences that got a slot in this step."""
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    """Guessed tokens behind the chunks that end their sequences, each a row with logits."""
    has_prompts: bool = False
    """Whether some chunks are parts of prompts."""
    span: Span | None = None
    """The part of a medium that the only chunk is in."""


def main_prompt(chunks: list[Chunk]) -> int | None:
    """The request whose prompt is more than half of the batch, if there is one."""
    sizes = [chunk.n_tokens for chunk in chunks]
    largest = max(sizes)
    if largest == 1 or 2 * largest <= sum(sizes):
        return None
    return chunks[sizes.index(largest)].sequence.request_id
