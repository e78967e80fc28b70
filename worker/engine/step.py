"""One step of the loop as a value (changes of the cells, then one batch), and how prompts share the
batch. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from worker.engine.cache.moves import Move
from worker.engine.media.span import Span
from worker.engine.pace import TILE_TOKENS
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
    """Guessed tokens after the chunks that end their sequences, each a row with logits."""
    has_prompts: bool = False
    """Whether some chunks are parts of prompts."""
    span: Span | None = None
    """The part of a medium that the only chunk belongs to; `None` if the chunks are tokens."""


def main_prompt(chunks: list[Chunk]) -> int | None:
    """The request whose prompt is more than half of the batch, if there is one."""
    sizes = [chunk.n_tokens for chunk in chunks]
    largest = max(sizes)
    if largest == 1 or 2 * largest <= sum(sizes):
        return None
    return chunks[sizes.index(largest)].sequence.request_id


def split_budget(
    sequences: list[Sequence], budget: int, *, oldest_first: bool = True
) -> list[Chunk]:
    """Split a budget of prompt tokens between sequences, which are in order of admission. Half of
    its tiles go to the oldest prompt, and an odd tile, too, if `oldest_first`; the rest goes to the
    prompts with the least left to compute.

    This way a short prompt after a long one soon starts to answer, and the long one always moves
    on. The oldest's share is whole tiles: in a split pool, each prompt takes a pass of its own.
    """
    n_tiles = max(budget // TILE_TOKENS, 1)
    half = (n_tiles + oldest_first) // 2 * TILE_TOKENS
    shares = {0: min(sequences[0].n_next, half, budget)}
    budget -= shares[0]
    for rank in sorted(range(len(sequences)), key=lambda rank: sequences[rank].n_left):
        if not budget:
            break
        taken = shares.get(rank, 0)
        more = min(sequences[rank].n_next - taken, budget)
        shares[rank] = taken + more
        budget -= more
    parts = [(sequences[rank], n) for rank, n in sorted(shares.items()) if n]
    return [Chunk(sequence, sequence.n_computed, n) for sequence, n in parts]


def shrink(chunks: list[Chunk]) -> list[Chunk] | None:
    """A smaller batch after "no room": only decode rows if there are any, else half of the prompt
    tokens; `None` if it cannot get smaller."""
    if any(chunk.sequence.next_span is not None for chunk in chunks):
        return None  # a chunk of embeddings is not split
    decodes = [chunk for chunk in chunks if chunk.sequence.is_decoding]
    prefills = [chunk for chunk in chunks if not chunk.sequence.is_decoding]
    if decodes and prefills:
        return decodes
    n_tokens = sum(chunk.n_tokens for chunk in prefills) // 2
    if n_tokens == 0:
        return None
    return split_budget([chunk.sequence for chunk in prefills], n_tokens)
