"""Has the disk's threads read what arriving requests can continue from, and write what is new.

Engine thread: nothing here blocks on a file.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from worker.engine.cache.cache import MIN_SHARED_TOKENS, MOST_SECONDS, Cache
from worker.engine.cache.carrier import Carrier
from worker.engine.cache.disk import Disk
from worker.engine.cache.disk_file import Entry
from worker.engine.cache.moves import State
from worker.engine.sequence import Sequence
from worker.observability.logs import get_logger

log = get_logger()

_LEAST_PATIENCE = 2.0
"""A request waits for the disk as long as it would take to compute what is read, but at least this
many seconds."""


class DiskTraffic:
    """At most one state is being read from the disk and one being written to it."""

    def __init__(
        self,
        disk: Disk,
        cache: Cache,
        carrier: Carrier,
        call: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        """`call` runs an action on the engine thread; any thread may use it."""
        self.disk, self._cache, self._carrier = disk, cache, carrier
        self._call, self._clock = call, clock
        self._due: deque[tuple[Sequence, Entry, int]] = deque()
        """The sequences that wait, in order of arrival, each with the file to read for it and the
        number of the file's tokens that it can use. The first stays while its file is read."""
        self._patient_until = math.inf
        """When the first stops waiting, be it for the file or for room in memory."""
        self.is_reading = self.is_writing = False
        self._hangs = False
        """Whether a read or write takes too long to wait for; until it ends, no request waits for
        the disk."""

    def look_up(self, sequence: Sequence) -> None:
        """Have the disk read what an arriving sequence can continue from, if that saves time."""
        if self._hangs or not sequence.may_reuse:
            return
        found = self.disk.longest(sequence.tokens[:-1], sequence.request.scope)
        if found is not None and self._saves_time(sequence, *found):
            sequence.awaits_disk = True
            self._due.append((sequence, *found))

    def _saves_time(self, sequence: Sequence, entry: Entry, length: int) -> bool:
        """Whether reading `length` of a sequence's tokens takes less time than computing those that
        neither cells nor memory have."""
        if not self._cache.fits_part(len(entry.tokens), sequence.tokens):
            return False
        cache, match = self._cache, self._cache.match(sequence)
        n_more = length - (match.awaited.length if match.awaited is not None else match.n_ready)
        if n_more < MIN_SHARED_TOKENS or entry.size_bytes > cache.memory.most_bytes:
            return False
        seconds = entry.size_bytes * (cache.reading.per_byte + cache.copying.per_byte)
        per_token = cache.pace.seconds_per_prompt_token
        if per_token and seconds > n_more * per_token:
            cache.reading.relax()
            return False
        return True

    def start_due(self) -> None:
        """Start the next read and write, unless one is under way; end waits that are too long."""
        if not self.is_reading:
            self._read_next()
        if self._clock() >= self._patient_until:
            self._stop_waiting()
        if not self.is_writing:
            self._save_new()
            self._write_next()

    def _read_next(self) -> None:
        while self._due and not self._due[0][0].awaits_disk:
            self._end_first_wait()  # the sequence has ended
        if not self._due:
            return
        sequence, entry, length = self._due[0]
        if not self._saves_time(sequence, entry, length):  # it was read for another since
            self._end_first_wait()
            return
        began = self._clock()
        if self._patient_until == math.inf:
            seconds = length * self._cache.pace.seconds_per_prompt_token
            self._patient_until = began + max(_LEAST_PATIENCE, seconds)
        memory = self._cache.memory
        if memory.locked_bytes + entry.size_bytes > memory.most_bytes:
            return  # until earlier requests, or the disk, unlock their states
        self.is_reading = True

        def done(state: State | None) -> None:
            seconds = self._clock() - began  # `call` waits for the step that is being computed
            self._call(lambda: self._has_read(sequence, state, seconds))

        self.disk.read(entry, sequence.request.scope, done)

    def _end_first_wait(self) -> None:
        """The first sequence that waits for the disk waits no longer."""
        sequence, _, _ = self._due.popleft()
        sequence.awaits_disk = False
        self._patient_until = math.inf

    def _stop_waiting(self) -> None:
        """End all waits for the disk: the sequences compute their tokens instead."""
        while self._due:
            self._end_first_wait()
        if self.is_reading or self.is_writing:  # else only other requests' states took the room
            self._hangs = True
            log.warning("kv_store.hangs")

    def _has_read(self, sequence: Sequence, state: State | None, seconds: float) -> None:
        cache, self.is_reading, self._hangs = self._cache, False, False
        is_awaited = sequence.awaits_disk
        if self._due and self._due[0][0] is sequence:
            self._end_first_wait()
        if state is None:
            return
        cache.reading.paid(state.all_bytes, seconds)
        state.last_used, state.n_locks = cache.now, int(is_awaited)
        if cache.memory.keep(state) and is_awaited:
            sequence.saved = state

    def _save_new(self) -> None:
        """Copy to memory the most recently finished prefix that the disk does not have yet."""
        cache = self._cache
        for slot in sorted(cache.slots, key=lambda slot: slot.last_used, reverse=True):
            if not slot.is_new or (cache.is_busy and cache.expected_seconds(slot) > MOST_SECONDS):
                continue
            slot.is_new = False
            if self.disk.has(slot.kept, slot.scope):
                continue
            state = cache.save(slot)
            self._carrier.carry_out(cache.take_moves())
            if state is not None and state.data is not None:
                state.is_new = True
                return

    def _write_next(self) -> None:
        new = [each for each in self._cache.memory.states if each.is_new and each.data is not None]
        if not new:
            return
        state = max(new, key=lambda each: each.last_used)
        state.is_new = False
        fits = state.all_bytes <= self.disk.largest_bytes
        if fits and not self.disk.has(state.tokens, state.scope):
            state.n_locks += 1
            self.is_writing = True
            self.disk.write(state, lambda: self._call(lambda: self._wrote(state)))

    def _wrote(self, state: State) -> None:
        self._cache.memory.unlock(state)
        self.is_writing = False
        self._hangs = self._hangs and self.is_reading
