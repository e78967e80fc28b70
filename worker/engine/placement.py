"""Chooses the slots in which sequences run next to each other. Plain Python; engine thread.

With a split KV cache, llama.cpp computes one pass over all weights for each run of neighbouring
slots: eight streams in every other slot take eight passes a step. Sequences are therefore placed in
the holes between running ones, and moved together after others have ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from worker.engine.prefix_cache import Slot
from worker.engine.sequence import Sequence
from worker.engine.step import Copy, Step, Truncate

_MOST_MOVES = 4
"""The most moves in one step, which waits for the copies."""
MORE_TOKENS = 16
"""An answer is expected to go on for as many tokens as it has, and for these."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Streams that move to idle slots, as (stream, from, to)."""

    moves: list[tuple[Sequence, Slot, Slot]]
    saved: int
    """Passes that each step saves."""

    def saves(self, seconds_per_pass: float) -> float:
        """Seconds saved until the first of these answers ends.

        An answer is expected to go on for as many tokens as it has, and `MORE_TOKENS` more.
        """
        streams = (stream for stream, _, _ in self.moves)
        n_left = (min(s.n_most - len(s.tokens), s.n_out + MORE_TOKENS) for s in streams)
        return self.saved * seconds_per_pass * min(n_left)

    def carry_out(self, step: Step, now: int) -> None:
        """Change the owners of the slots, and add the moves of their cells to the step."""
        for stream, source, target in self.moves:
            if target.kept:
                step.moves.append(Truncate(target.index, 0))
            step.moves.append(Copy(source.index, target.index, stream.n_computed))
            step.moves.append(Truncate(source.index, 0))
            target.owner, target.kept, target.salt = stream, [], source.salt
            target.is_unsaved, target.last_used = False, now
            source.owner, stream.slot = None, target.index

    @property
    def n_cells(self) -> int:
        return sum(stream.n_computed + len(slot.kept) for stream, _, slot in self.moves)


def n_runs(used: set[int]) -> int:
    """The number of runs of neighbouring slots."""
    return sum(index - 1 not in used for index in used)


def added_runs(used: set[int], index: int) -> int:
    """The change in the number of runs when this slot is used: -1 between two used slots, 1 far
    off."""
    return 1 - (index - 1 in used) - (index + 1 in used)


def kept_seconds(slot: Slot, rounds: float, seconds_per_prompt_token: float) -> float:
    """Seconds of prompt computation that the cells of an idle slot are expected to save.

    That they will be reused is half as likely after each round of uses of all slots.
    """
    return len(slot.kept) * seconds_per_prompt_token * math.exp2(-rounds)


def best_moves(slots: list[Slot]) -> Moves | None:
    """The moves that save the most passes at the least cost; `None` if none saves a pass."""
    used = {slot.index for slot in slots if slot.owner is not None}
    if n_runs(used) < 2:
        return None
    found = (_moved_away(slots, used, group) for group in _groups(used))
    saving = [moves for moves in found if moves is not None]
    return min(saving, key=lambda m: (len(m.moves) - 2 * m.saved, m.n_cells), default=None)


def _groups(used: set[int]) -> Iterable[list[int]]:
    """Groups of slots to move away together: short runs, and single slots at the ends of runs."""
    run: list[int] = []
    for index in sorted(used):
        run.append(index)
        if index + 1 not in used:
            if len(run) <= _MOST_MOVES:
                yield run
            if len(run) > 1:
                yield run[:1]
                yield run[-1:]
            run = []


def _moved_away(slots: list[Slot], used: set[int], group: list[int]) -> Moves | None:
    """Move the group's streams to the best idle slots; `None` if that saves no pass."""
    left, moves = used.difference(group), []
    if not left:
        return None
    idle = [slot for slot in slots if slot.owner is None]
    for index in group:
        stream = slots[index].owner
        if not idle or stream is None or not stream.n_out or stream.request.deterministic:
            return None  # a prompt that is being computed is not moved
        target = min(idle, key=lambda slot: (added_runs(left, slot.index), len(slot.kept)))
        idle.remove(target)
        left.add(target.index)
        moves.append((stream, slots[index], target))
    saved = n_runs(used) - n_runs(left)
    return Moves(moves, saved) if saved > 0 else None
