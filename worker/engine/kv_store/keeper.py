"""Decides which states are copied between slots and store, and when. Engine thread.

Running streams wait for a copy, as it is made between two steps. A copy that would take longer than
`MOST_SECONDS` is therefore made when nothing runs. At most one state is being written and one being
read, so memory holds no more than two.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from worker.engine.backend import Backend
from worker.engine.kv_store.prefix_file import Prefix, usable
from worker.engine.kv_store.store import Counts, KvStore
from worker.engine.prefix_cache import MIN_SHARED_TOKENS, Match, Slot
from worker.engine.sequence import Sequence
from worker.engine.step import Snapshot

MOST_SECONDS = 0.1
"""The longest expected time for which a copy may delay running streams."""
FIRST_RATE = 256e6
"""The assumed speed of a copy in bytes per second, before one was measured."""
_PIECES_COST = 30
"""Copying scattered cells takes so many times as long as counting their bytes does."""
_MOST_COUNTING = 0.02
"""Seconds of that, for states that are stored at all: llama.cpp lists all pieces before it copies
one, and would take hundreds of MiB for the list where values lie transposed (no flash attention)
and the cells of one sequence between those of others."""


@dataclass(slots=True)
class _Reading:
    """A prefix that is being read for a sequence that waits for a slot."""

    sequence: Sequence
    prefix: Prefix | None = None
    """Set when it has been read."""
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class Restorable:
    """A stored prefix of which a sequence can use the first `length` tokens."""

    prefix: Prefix
    length: int
    snapshot: Snapshot | None = None
    """The snapshot needed to continue from there, if any."""


def expected_copy(backend: Backend, slot: Slot, rate: float) -> tuple[int, float]:
    """The bytes of a slot's state and the expected seconds for a copy of them; infinite if its
    cells lie too scattered."""
    began = time.thread_time()
    n_bytes = backend.state_bytes(slot.index)
    counting = time.thread_time() - began
    seconds = n_bytes / rate + _PIECES_COST * counting
    return n_bytes, seconds if counting <= _MOST_COUNTING else math.inf


def restorable(prefix: Prefix, prompt: array[int], cuts_anywhere: bool) -> Restorable:
    """What a prompt can use of a prefix; of length 0 if nothing."""
    lengths = [each.length for each in prefix.snapshots]
    length = usable(prefix.tokens, lengths, prompt, cuts_anywhere)
    if cuts_anywhere or length == len(prefix.tokens):
        return Restorable(prefix, length)
    snapshot = next((each for each in prefix.snapshots if each.length == length), None)
    return Restorable(prefix, length, snapshot)


class Keeper:
    def __init__(
        self, store: KvStore, backend: Backend, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._backend, self._clock = store, backend, clock
        self.call: Callable[[Callable[[], None]], None]
        """Runs an action on the engine thread; set by the loop."""
        self._rate = FIRST_RATE
        self.is_writing = False
        self._too_long: dict[int, int] = {}
        """Slots whose copy waits until nothing runs, each with its `last_used`."""
        self._reading: _Reading | None = None

    @property
    def counts(self) -> Counts:
        return self._store.counts

    # --- writing ---------------------------------------------------------------------------

    def keep(self, slots: Iterable[Slot], *, is_busy: bool) -> None:
        """Store the most recently used finished prefix that is not stored yet and can be copied
        now."""
        if self.is_writing:
            return
        unsaved = [slot for slot in slots if slot.is_unsaved]
        for slot in sorted(unsaved, key=lambda slot: slot.last_used, reverse=True):
            if is_busy and self._too_long.get(slot.index) == slot.last_used:
                continue
            if not self._is_worth_it(slot):
                slot.is_unsaved = False
                continue
            n_bytes, seconds = expected_copy(self._backend, slot, self._rate)
            if is_busy and seconds > MOST_SECONDS:
                self._too_long[slot.index] = slot.last_used
                continue
            slot.is_unsaved = False
            if seconds < math.inf and self._copy(slot, n_bytes):
                return

    def _is_worth_it(self, slot: Slot) -> bool:
        n_tokens = len(slot.kept)
        if n_tokens < MIN_SHARED_TOKENS or not self._backend.can_cut(slot.index, n_tokens):
            return False
        return not self._store.has(slot.kept, slot.salt)

    def _copy(self, slot: Slot, n_bytes: int) -> bool:
        """Copy a slot's state and pass it to the store; returns false if that is impossible."""
        whole = n_bytes + sum(len(each.state) for each in slot.snapshots)
        if not 0 < whole <= self._store.largest_bytes:
            return False
        began = self._clock()
        state = self._backend.state(slot.index, n_bytes)
        self.copied(n_bytes, self._clock() - began)
        if state is None:
            return False
        prefix = Prefix(array("i", slot.kept), state, tuple(slot.snapshots))
        self.is_writing = True
        self._store.write(prefix, slot.salt, lambda: self.call(self._written))
        return True

    def copied(self, n_bytes: int, seconds: float) -> None:
        """Record the speed of a copy, which the next one is expected to have."""
        self._rate = n_bytes / max(seconds, 1e-4)

    def _written(self) -> None:
        self.is_writing = False

    # --- reading ---------------------------------------------------------------------------

    def awaits(self, sequence: Sequence, match: Match | None, *, is_busy: bool) -> bool:
        """Whether a sequence must wait for a stored prefix that is longer than what the slots have.

        The first call starts to read that prefix.
        """
        reading = self._reading
        if reading is not None and reading.sequence is sequence:
            return not reading.is_done
        if sequence.was_looked_up:
            return False
        found = self._store.longest(sequence.tokens[:-1], sequence.request.cache_salt)
        n_soon = match.n_soon if match is not None else 0
        if found is not None and found[1] - n_soon >= MIN_SHARED_TOKENS:
            entry = found[0]
            if not is_busy or entry.state_bytes / self._rate <= MOST_SECONDS:
                if reading is not None:
                    return True  # one after another
                begun = self._reading = _Reading(sequence)
                self._store.read(entry, lambda prefix: self.call(lambda: _has_read(begun, prefix)))
                sequence.was_looked_up = True
                return True
        sequence.was_looked_up = True
        return False

    @property
    def is_reading(self) -> bool:
        return self._reading is not None and not self._reading.is_done

    def take(self, sequence: Sequence, match: Match | None) -> Restorable | None:
        """The prefix that was read for a sequence, if it is longer than what the slots have."""
        if self._reading is None or self._reading.sequence is not sequence:
            return None
        prefix, self._reading = self._reading.prefix, None
        if prefix is None:
            return None
        found = restorable(prefix, array("i", sequence.tokens[:-1]), self._backend.cuts_anywhere)
        n_ready = match.n_ready if match is not None else 0
        return found if found.length >= n_ready + MIN_SHARED_TOKENS else None

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that ended before it got a slot."""
        if self._reading is not None and self._reading.sequence is sequence:
            self._reading = None


def _has_read(reading: _Reading, prefix: Prefix | None) -> None:
    reading.prefix, reading.is_done = prefix, True
