"""States of idle slots, copied out of a pool of cells that all slots share. Engine thread.

llama.cpp's attention goes over all cells up to the highest used one, whoever's they are. What idle
slots keep for reuse therefore costs time in every step of the others; in a copy it costs none.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable

from worker.devices.plan.cells import LARGEST_SHARE
from worker.engine.backend import Backend
from worker.engine.kv_store.keeper import (
    FIRST_RATE,
    MOST_SECONDS,
    Restorable,
    expected_copy,
    restorable,
)
from worker.engine.kv_store.prefix_file import Prefix
from worker.engine.prefix_cache import MIN_SHARED_TOKENS, Slot
from worker.engine.sequence import Sequence


class Shelf:
    """The states of at most `most_bytes`.

    The least recently used gives way to a new one, but never one of as many as there are slots: the
    cells alone would have kept those.
    """

    def __init__(
        self,
        backend: Backend,
        most_bytes: int,
        n_slots: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend, self._most_bytes, self._n_slots = backend, most_bytes, n_slots
        self._clock = clock
        self._rate = FIRST_RATE
        self._prefixes: list[tuple[str | None, Prefix]] = []
        """Each with its salt, the most recently used last."""

    def put_all(self, slots: Iterable[Slot]) -> list[Slot]:
        """Copy what these idle slots keep, the most recently used first, for a limited time.

        Returns the slots that need not keep it any longer.
        """
        began, put = self._clock(), []
        for slot in sorted(slots, key=lambda slot: slot.last_used, reverse=True):
            if self._put(slot, MOST_SECONDS - (self._clock() - began)):
                put.append(slot)
        return put

    def take(
        self, sequence: Sequence, n_ready: int, seconds_per_token: float, *, is_busy: bool
    ) -> Restorable | None:
        """The state with the longest beginning of a prompt, if that saves time.

        `n_ready` tokens of the prompt are in cells already; `seconds_per_token` is what computing
        one takes, 0 if that is not known. A state of which all tokens are used leaves the shelf.
        """
        prompt, salt = array("i", sequence.tokens[:-1]), sequence.request.cache_salt
        best, at = None, -1
        for index, (its_salt, prefix) in enumerate(self._prefixes):
            if its_salt == salt and prefix.tokens[:MIN_SHARED_TOKENS] == prompt[:MIN_SHARED_TOKENS]:
                found = restorable(prefix, prompt, self._backend.cuts_anywhere)
                if best is None or found.length > best.length:
                    best, at = found, index
        if best is None or best.length < n_ready + MIN_SHARED_TOKENS:
            return None
        copying = len(best.prefix.state) / self._rate
        computing = (best.length - n_ready) * seconds_per_token
        if (computing and copying > computing) or (is_busy and copying > MOST_SECONDS):
            return None
        entry = self._prefixes.pop(at)
        if best.length < len(best.prefix.tokens):
            self._prefixes.append(entry)
        return best

    def _put(self, slot: Slot, seconds_left: float) -> bool:
        if len(slot.kept) < MIN_SHARED_TOKENS:
            return True  # too short to be reused
        tokens, salt, cuts_anywhere = array("i", slot.kept), slot.salt, self._backend.cuts_anywhere
        for its_salt, prefix in self._prefixes:
            if its_salt == salt and restorable(prefix, tokens, cuts_anywhere).length == len(tokens):
                return True
        if not self._backend.can_cut(slot.index, len(tokens)):
            return False
        n_bytes, seconds = expected_copy(self._backend, slot, self._rate)
        whole = n_bytes + sum(len(each.state) for each in slot.snapshots)
        if not 0 < whole <= self._most_bytes // LARGEST_SHARE:
            return False
        kept = [
            (its_salt, prefix)
            for its_salt, prefix in self._prefixes
            if its_salt != salt or prefix.tokens != tokens[: len(prefix.tokens)]
        ]
        if seconds > seconds_left or not self._fit(kept, whole):
            return False
        began = self._clock()
        state = self._backend.state(slot.index, n_bytes)
        if state is None:
            return False
        self._rate = n_bytes / max(self._clock() - began, 1e-4)
        self._prefixes = [*kept, (salt, Prefix(tokens, state, tuple(slot.snapshots)))]
        return True

    def _fit(self, kept: list[tuple[str | None, Prefix]], n_bytes: int) -> bool:
        """Drop the oldest of `kept` until `n_bytes` more fit; returns false if too few may go."""
        free = self._most_bytes - n_bytes - sum(prefix.n_bytes for _, prefix in kept)
        while free < 0 and len(kept) >= self._n_slots:
            free += kept.pop(0)[1].n_bytes
        return free >= 0
