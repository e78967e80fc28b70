"""Carries out the moves that `Cache` has planned, with native calls and clocks.

Engine thread. Running streams wait for a copy, as it is made between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from worker.engine.cache.cache import Cache
from worker.engine.cache.moves import Copy, Divide, Move, Restore, Save, State, Truncate
from worker.engine.sequence import Sequence
from worker.llama.context import Context
from worker.observability.logs import get_logger

log = get_logger()

_MOST_COUNTING = 0.02
"""A state is copied only if its size was found in this many seconds of CPU time: llama.cpp lists
all pieces before it copies one, and the list takes hundreds of MiB if values are transposed (no
flash attention) and the cells of one sequence lie between those of others."""


class Carrier:
    def __init__(self, cache: Cache, cells: Context, clock: Callable[[], float]) -> None:
        self._cache, self._cells, self._clock = cache, cells, clock

    def carry_out(self, moves: Iterable[Move]) -> None:
        """Change the cells as planned. A move that fails leaves its slot empty, and the slot's
        sequence starts over."""
        cache, cells = self._cache, self._cells
        for move in moves:
            match move:
                case Save(slot, state):
                    self._save(slot, state)
                case Divide():
                    self._divide(move)
                case Truncate(slot) | Copy(_, slot) | Restore(slot):
                    if not self._change_slot(move):
                        cells.truncate(slot, 0)
                        cache.start_over(slot)
                    if cache.limits.window:
                        cache.slots[slot].first = cells.first_position(slot)

    def after_batch(self, sequences: Iterable[Sequence]) -> None:
        """After a batch of these sequences, whose memory cannot be cut anywhere: read which cells
        windows have left, and take the snapshots that are due."""
        cache, cells = self._cache, self._cells
        if cache.limits.window:  # new cells overwrite old ones; in one pool, even those of others
            for slot in cache.slots:
                slot.first = cells.first_position(slot.index)
        for sequence in sequences:
            is_due = sequence.n_computed in sequence.snapshot_at
            if is_due and sequence.slot is not None:  # it may have failed in this step
                cache.keep_snapshot(sequence, cells.snapshot(sequence.slot))

    def save_while(self, is_idle: Callable[[], bool]) -> None:
        """While idle, copy to memory what the next request would have to wait for."""
        for slot in self._cache.next_out():
            if not is_idle():
                return
            self._cache.save(slot)
            self.carry_out(self._cache.take_moves())

    def _change_slot(self, move: Truncate | Copy | Restore) -> bool:
        """Returns false if it fails; what the slot then has is undefined."""
        cells = self._cells
        data = move.snapshot.data if move.snapshot is not None else None
        length = self._cache.position(move.slot, move.length)
        match move:
            case Truncate(slot, is_recent=is_recent):
                return cells.truncate(slot, length, data, is_recent=is_recent)
            case Copy(source, slot):
                return cells.copy(source, slot, length, data)
            case Restore(slot, state):
                return self._restore(slot, state) and cells.truncate(slot, length, data)

    def _divide(self, move: Divide) -> None:
        began = self._clock()
        self._cells.divide(*move)
        seconds = round(self._clock() - began, 3)
        log.info("engine.cells_divided", **move._asdict(), seconds=seconds)

    def _save(self, slot: int, state: State) -> None:
        began = time.thread_time()
        n_bytes = self._cells.state_bytes(slot)
        counting = time.thread_time() - began
        if counting <= _MOST_COUNTING and 0 < n_bytes <= self._cache.memory.most_bytes:
            at = self._clock()
            state.data, state.n_bytes = self._cells.state(slot, n_bytes), n_bytes
            if state.data is not None:
                self._cache.saved(state, self._clock() - at)
                return
        self._cache.memory.drop(state)

    def _restore(self, slot: int, state: State) -> bool:
        if state.data is None:
            return False
        began = self._clock()
        done = self._cells.restore(slot, state.data)
        self._cache.copying.paid(state.n_bytes, self._clock() - began)
        return done
