"""Shares a step's prompt tokens out, in the tiles that the attention computes. Engine thread.

Plain Python.
"""

from __future__ import annotations

from collections.abc import Set

from worker.engine.limits import Limits
from worker.engine.pace import TILE_TOKENS, Pace
from worker.engine.sequence import Sequence
from worker.engine.step import Chunk


class Prompts:
    def __init__(self, limits: Limits, pace: Pace) -> None:
        self._limits, self._pace = limits, pace
        self._oldest_first = True

    def chunks(
        self, prefilling: list[Sequence], *, beside: list[Chunk], n_waiting: int
    ) -> list[Chunk]:
        """The prompts' part of a step with the decode rows `beside`; `n_waiting` requests have no
        slot yet.

        Beside running streams, their pace limits it too.
        """
        limits = self._limits
        budget = most = min(limits.prefill_budget, limits.batch - len(beside))
        if beside:
            n_behind = n_waiting + len(prefilling) - 1
            budget = min(self._pace.budget(len(beside), n_behind), most)
        self._oldest_first = not self._oldest_first
        chunks = share(prefilling, budget, oldest_first=self._oldest_first)
        if not limits.tiled or most < TILE_TOKENS:
            return chunks
        if limits.one_pass:
            return in_whole_tiles(chunks, most, n_beside=len(beside), giving=frozenset())
        prompts, decoding = _slots(chunks), _slots(beside)
        # Recurrent memory in one pool: all sequences are computed together.
        together = bool(beside) and limits.unified
        giving = prompts if together else neighbours(prompts, decoding)
        return in_whole_tiles(chunks, most, n_beside=0, giving=giving)


def _slots(chunks: list[Chunk]) -> set[int]:
    return {chunk.sequence.slot for chunk in chunks if chunk.sequence.slot is not None}


def neighbours(prompts: Set[int], decoding: Set[int]) -> set[int]:
    """The slots of prompts whose run of neighbouring slots has decode rows."""
    found = set()
    for slot in prompts:
        for step in (-1, 1):
            at = slot + step
            while at in prompts:
                at += step
            if at in decoding:
                found.add(slot)
    return found


def share(sequences: list[Sequence], budget: int, *, oldest_first: bool = True) -> list[Chunk]:
    """Split a budget of prompt tokens between sequences in the order of admission: half of its
    tiles are the oldest prompt's, the rest goes to the prompts with the least left to compute. An
    odd tile is the oldest's if it is its turn.

    So a short prompt behind a long one starts to answer soon, and the long one always moves on. No
    two prompts share a tile where one of them fills it: each prompt in a step is a pass of its own.
    """
    if not sequences or budget <= 0:
        return []
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
    given = [(sequences[rank], n) for rank, n in sorted(shares.items()) if n]
    return [Chunk(sequence, sequence.n_computed, n) for sequence, n in given]


def in_whole_tiles(
    chunks: list[Chunk], room: int, *, n_beside: int, giving: Set[int]
) -> list[Chunk]:
    """Fit prompts to the tiles of the passes in which they are computed, with `room` tokens in all.

    `n_beside` decode rows are in the same pass and fill a part of a tile. Prompts in the slots of
    `giving` give their first row to the pass of their neighbours' decode rows, and the tiles come
    after it. What is left of a prompt is computed together with its last whole tile.
    """
    fitted: list[Chunk] = []
    for chunk in chunks:
        sequence, start, n_tokens = chunk
        if n_tokens < sequence.n_next:
            tiles, rest = divmod(n_tokens, TILE_TOKENS)
            if not tiles and fitted and rest < TILE_TOKENS // 2:
                continue  # too little of a tile to pay for it
            more = -n_beside % TILE_TOKENS or (sequence.slot in giving)
            more -= TILE_TOKENS * (more > TILE_TOKENS // 2)
            n_tokens, n_beside = max(tiles, 1) * TILE_TOKENS + more, 0
            if sequence.n_next - n_tokens < TILE_TOKENS:
                is_long = tiles > 1 and n_tokens < sequence.n_next
                n_tokens = n_tokens - TILE_TOKENS if is_long else sequence.n_next
        n_tokens = min(n_tokens, room)
        room -= n_tokens
        if n_tokens:
            fitted.append(Chunk(sequence, start, n_tokens))
    return fitted


def shrink(chunks: list[Chunk]) -> list[Chunk] | None:
    """A smaller batch after "no room": only decode rows if there are any, else half of the prompt
    tokens; `None` if it cannot get smaller."""
    if any(chunk.sequence.next_span is not None for chunk in chunks):
        return None  # embeddings are computed as they are planned
    decodes = [chunk for chunk in chunks if chunk.sequence.is_decoding]
    prefills = [chunk for chunk in chunks if not chunk.sequence.is_decoding]
    if decodes and prefills:
        return decodes
    n_tokens = sum(chunk.n_tokens for chunk in prefills) // 2
    if n_tokens == 0:
        return None
    return share([chunk.sequence for chunk in prefills], n_tokens)
