"""States of idle slots, copied out of a pool of cells that all slots share. Engine thread.

llama.cpp's attention goes over all cells up to the highest used one, whoever's they are. What idle
slots keep for reuse therefore costs time in every step of the others; in a copy it costs none.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.devices.plan.cells import LARGEST_SHARE
from worker.engine.backend import Backend
from worker.engine.kv_store.keeper import (
    FIRST_RATE,
    MOST_SECONDS,
    Restorable,
    expected_copy,
    restorable,
)
from worker.engine.kv_store.prefix_file import Prefix, usable
from worker.engine.prefix_cache import MIN_SHARED_TOKENS, Match, Slot
from worker.engine.sequence import Sequence as EngineSequence

_MOST_ALONE = 1.0
"""The longest expected time in seconds of a first copy while nothing runs."""
_NEWEST = 0.3
"""Weight of the newest copy in the mean speed: one that was interrupted does not decide alone."""


@dataclass(slots=True, eq=False)
class _Entry:
    prefix: Prefix
    salt: str | None
    last_used: int
    """As of the slot that it was copied from."""


class Shelf:
    """The states of at most `most_bytes`.

    One gives way to others only if there are as many conversations that were used later, on the
    shelf and in slots, as there are slots: until then its cells would have been kept.
    """

    def __init__(
        self, backend: Backend, most_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend, self._most_bytes, self._clock = backend, most_bytes, clock
        self._rate = FIRST_RATE
        self._entries: list[_Entry] = []

    def put_all(self, kept: Sequence[Slot], slots: Sequence[Slot], *, is_busy: bool) -> list[Slot]:
        """Copy what the slots of `kept`, which are idle ones of `slots`, keep; the most recently
        used first, for a limited time.

        Returns the slots that need not keep it any longer.
        """
        began, put = self._clock(), []
        seconds = MOST_SECONDS if is_busy else _MOST_ALONE
        for slot in sorted(kept, key=lambda slot: slot.last_used, reverse=True):
            if self._put(slot, slots, seconds):
                put.append(slot)
            seconds = MOST_SECONDS - (self._clock() - began)
        return put

    def copy_while(self, slots: Sequence[Slot], is_idle: Callable[[], bool]) -> None:
        """Copy what all slots but the most recently used one keep, so that `put_all` need not.

        Where there is one conversation, it is never copied.
        """
        kept = sorted((slot for slot in slots if slot.kept), key=lambda slot: slot.last_used)
        for slot in kept[:-1]:
            if not self._most_bytes or not is_idle():
                return
            self._put(slot, slots, _MOST_ALONE)

    def find(
        self,
        sequence: EngineSequence,
        match: Match | None,
        most_cells: int,
        seconds_per_token: float,
    ) -> Restorable | None:
        """The state with the longest beginning of a prompt, if that saves time.

        `match` is what slots have of it; a state may have `most_cells` tokens; `seconds_per_token`
        is what computing one takes, 0 if that is not known.
        """
        if not self._entries or not sequence.may_reuse:
            return None
        n_ready = match.n_ready if match is not None else 0
        prompt, cuts_anywhere = array("i", sequence.tokens[:-1]), self._backend.cuts_anywhere
        head, salt = prompt[:MIN_SHARED_TOKENS], sequence.request.cache_salt
        found = [
            restorable(entry.prefix, prompt, cuts_anywhere)
            for entry in self._entries
            if entry.salt == salt and entry.prefix.tokens[:MIN_SHARED_TOKENS] == head
            if len(entry.prefix.tokens) <= most_cells
        ]
        best = max(found, key=lambda each: (each.length, -each.prefix.n_bytes), default=None)
        if best is None or best.length < n_ready + MIN_SHARED_TOKENS:
            return None
        computing = (best.length - n_ready) * seconds_per_token
        return best if not computing or best.prefix.n_bytes / self._rate <= computing else None

    def use(self, prefix: Prefix, now: int) -> None:
        """Record that a prefix is used. It stays: its sequence may lose its cells."""
        for entry in self._entries:
            if entry.prefix is prefix:
                entry.last_used = now

    def _put(self, slot: Slot, slots: Sequence[Slot], most_seconds: float) -> bool:
        if len(slot.kept) < MIN_SHARED_TOKENS:
            return True  # too short to be reused
        tokens, cuts_anywhere = array("i", slot.kept), self._backend.cuts_anywhere
        same_salt = [entry for entry in self._entries if entry.salt == slot.salt]
        for entry in same_salt:
            if restorable(entry.prefix, tokens, cuts_anywhere).length == len(tokens):
                entry.last_used = max(entry.last_used, slot.last_used)
                return True
        if not self._backend.can_cut(slot.index, len(tokens)):
            return False
        n_bytes, seconds = expected_copy(self._backend, slot, self._rate)
        whole = n_bytes + sum(len(each.state) for each in slot.snapshots)
        if not 0 < whole <= self._most_bytes // LARGEST_SHARE or seconds > most_seconds:
            return False
        lengths = [each.length for each in slot.snapshots]
        replaced = [
            entry
            for entry in same_salt
            if usable(tokens, lengths, entry.prefix.tokens, cuts_anywhere)
            == len(entry.prefix.tokens)
        ]
        if not self._make_room(whole, replaced, slots):
            return False
        began = self._clock()
        state = self._backend.state(slot.index, n_bytes)
        if state is None:
            return False
        rate = n_bytes / max(self._clock() - began, 1e-4)
        self._rate += _NEWEST * (rate - self._rate)
        prefix = Prefix(tokens, state, tuple(slot.snapshots))
        self._entries.append(_Entry(prefix, slot.salt, slot.last_used))
        return True

    def _make_room(self, n_bytes: int, replaced: list[_Entry], slots: Sequence[Slot]) -> bool:
        """Drop the replaced entries and the least recently used ones that may give way, if that is
        enough."""
        left = [entry for entry in self._entries if entry not in replaced]
        left.sort(key=lambda entry: entry.last_used)
        used = [slot.last_used for slot in slots if slot.tokens]
        free = self._most_bytes - n_bytes - sum(entry.prefix.n_bytes for entry in left)
        while free < 0 and left:
            n_later = len(left) - 1 + sum(at > left[0].last_used for at in used)
            if n_later < len(slots):
                return False
            free += left.pop(0).prefix.n_bytes
        self._entries = left
        return free >= 0
