"""The books of the cache: what a prompt continues from, and what is evicted. Plain Python.

`Cache` decides and records `moves`; the `Carrier` carries them out. Engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from worker.engine.cache.memory import Memory
from worker.engine.cache.moves import Copy, Divide, Move, Restore, Save, Snapshot, State, Truncate
from worker.engine.cache.slots import Slot, count_cells, share, unshare
from worker.engine.limits import Limits
from worker.engine.media.span import position_of
from worker.engine.pace import FORGOTTEN, NEWEST, Pace, moved
from worker.engine.sequence import Awaited, Sequence
from worker.engine.tokens import common_length

MIN_SHARED_TOKENS = 32
"""A shorter common prefix is not reused."""
_MIN_AWAITED_TOKENS = 8
"""A prompt does not wait for fewer common tokens than this."""
SNAPSHOT_TAIL = 16
"""Tokens after the snapshot at a prompt's end: the next turn of a conversation may write them
differently, and the last one is always computed."""
SPACING = 2048
"""Tokens between the snapshots of a long prompt. A later prompt that differs from some token on
computes fewer than these again."""
MOST_SECONDS, _MOST_SECONDS_ALONE = 0.1, 2.0
"""The longest expected time of a step's copies to memory, beside running streams and without. What
would take longer stays in its cells, or is lost with them."""
_COPIED, _READ = 1e-9, 4e-9
"""The seconds to copy a byte and to read one from the disk, until they are measured."""
_MORE_TOKENS = 16
"""An answer is expected to continue for as many tokens as it has, plus these."""


class Price:
    """The measured time to bring a byte back."""

    def __init__(self, expected: float) -> None:
        self.per_byte = self._expected = expected
        """In seconds."""

    def paid(self, n_bytes: int, seconds: float) -> None:
        """Record the time of `n_bytes`. One time that was interrupted does not decide alone."""
        self.per_byte = moved(self.per_byte, seconds / max(n_bytes, 1), NEWEST)

    def relax(self) -> None:
        """Lower it towards the expected one. It was too high to pay, so no measurement will."""
        self.per_byte = min(self.per_byte, moved(self.per_byte, self._expected, FORGOTTEN))


@dataclass(frozen=True, slots=True)
class Match:
    """What a prompt can continue from."""

    source: Slot | State | None = None
    n_ready: int = 0
    """The number of its tokens that can be reused now."""
    snapshot: Snapshot | None = None
    """The snapshot that is needed to cut the source there."""
    n_common: int = 0
    """The length of the longest prefix in common with anything there is, computed or not."""
    awaited: Awaited | None = None
    """A longer prefix that is being computed, and should not be computed twice."""


class Cache:
    def __init__(self, limits: Limits, pace: Pace) -> None:
        """`pace` has the time to compute a token."""
        self.limits, self.pace = limits, pace
        self.copying, self.reading = Price(_COPIED), Price(_READ)
        """The prices of copies between cells and memory, and of reads from the disk."""
        self.slots = [Slot(index) for index in range(limits.n_slots)]
        self.memory = Memory(limits.memory_bytes, self.slots, limits)
        self.moves: list[Move] = []
        """Those planned and not carried out yet, in order."""
        self.read: set[int] = set()
        self.written: set[int] = set()
        """Slots that moves have read or written since the last batch was computed."""
        self._bytes_per_cell = limits.cell_bytes
        self._copying_seconds = 0.0
        """The expected time of the copies from and to memory in `moves`."""
        self._n_pushed_out = 0
        """Conversations pushed out of their slots since one last came back from memory."""
        self.now = 0
        """Counts uses, to order them."""

    # --- what there is -----------------------------------------------------------------------

    @property
    def n_idle(self) -> int:
        return sum([slot.owner is None for slot in self.slots])

    @property
    def is_busy(self) -> bool:
        """Whether sequences run: they wait while copies are made."""
        return any(slot.owner is not None for slot in self.slots)

    @property
    def takes_snapshots(self) -> bool:
        limits = self.limits
        return limits.prefix_cache and not limits.cuts_anywhere and limits.memory_bytes > 0

    @property
    def is_settled(self) -> bool:
        """Whether no copy waits for the next batch."""
        return not self.read and not self.written

    @property
    def cells_running(self) -> int:
        return count_cells([s for s in self.slots if s.owner is not None], lambda s: s.n_cells)

    @property
    def cells_cached(self) -> int:
        """Cells that are kept only for reuse."""
        return count_cells(self.slots, lambda slot: slot.n_cells) - self.cells_running

    def match(self, sequence: Sequence) -> Match:
        """The match that saves a sequence the most time.

        Its last token is always computed: the next one is drawn from its logits.
        """
        tokens, scope, most = sequence.tokens, sequence.request.scope, len(sequence.tokens) - 1
        slots: list[Match] = []
        matches: list[Match] = []
        if sequence.saved is not None:
            matches.append(self._of_state(sequence.saved, tokens, most))
        if sequence.may_reuse and self.limits.prefix_cache and most >= MIN_SHARED_TOKENS:
            head = tokens[:MIN_SHARED_TOKENS]
            slots = [
                self._of_slot(slot, common_length(slot.tokens, tokens, most))
                for slot in self.slots
                if slot.scope == scope and slot.tokens[:MIN_SHARED_TOKENS] == head
                if slot.owner is None or not slot.owner.request.deterministic
            ]
            states = self.memory.find(tokens, scope, MIN_SHARED_TOKENS)
            matches += slots + [self._of_state(state, tokens, most) for state in states]
        if sequence.spans:
            matches = [each for each in matches if sequence.can_continue_from(each.n_ready)]
        best = max(matches, key=self._gain, default=Match())
        if self._gain(best) <= 0:
            best = Match()
        all_awaited = (match.awaited for match in slots if match.awaited is not None)
        possible = (each for each in all_awaited if each.owner.can_continue_from(each.length))
        awaited = max(possible, key=lambda each: each.length, default=None)
        if awaited is not None and awaited.length - best.n_ready < _MIN_AWAITED_TOKENS:
            awaited = None
        n_common = max((match.n_common for match in matches), default=0)
        return replace(best, n_common=n_common, awaited=awaited)

    def fits(self, sequence: Sequence, match: Match) -> bool:
        """Whether there are cells for a sequence beside those that running ones have or need.

        It needs one more cell than it has tokens, for the next token that is sampled.
        """
        if not self.limits.unified:
            return True
        running = [slot for slot in self.slots if slot.owner is not None]
        n_cells, source = len(sequence.tokens) + 1, match.source
        if isinstance(source, State):
            n_cells = max(n_cells, len(source.tokens))
        elif source is not None and source.owner is not None:
            n_cells -= match.n_ready
        elif source is not None:
            held = {part for slot in running for part in slot.shared}
            n_held = sum([part.n_cells for part in source.shared if part in held])
            n_cells -= min(n_held, match.n_ready)
        n_used = count_cells(running, lambda slot: len(slot.tokens))
        return n_used + n_cells <= self.limits.n_cells

    def fits_part(self, n_tokens: int, tokens: list[int]) -> bool:
        """Whether a state of `n_tokens` fits into the cells that one slot can have while a sequence
        of `tokens` runs."""
        return n_tokens <= max(self.limits.longest, len(tokens))

    # --- slots come and go -------------------------------------------------------------------

    def acquire(self, sequence: Sequence, match: Match) -> bool:
        """Give a sequence a slot with what it continues from.

        Returns false, without a change, if that needs a slot that no batch has settled since a move
        used it, or if running streams would wait too long for this step's copies. Alone, a sequence
        that continues from nothing can have any slot: its batch settles all moves first.
        """
        source, n_ready = match.source, match.n_ready
        slot = self._slot_for(sequence, match)
        if slot is None:
            return False
        if isinstance(source, State):
            planned, seconds = self._copying_seconds, source.n_bytes * self.copying.per_byte
            if self.is_busy and planned and planned + seconds > MOST_SECONDS:
                return False
            self._copying_seconds += seconds
            if source is not sequence.saved:
                self._n_pushed_out = 0
        for used in (source, match.snapshot):
            if used is not None:
                used.last_used = self._tick()
        if slot is source:
            self._cut(slot, match)
        else:
            if slot.kept:
                self._push_out(slot)
            self._bring(match, slot)
        slot.owner, slot.kept, slot.is_new = sequence, [], False
        slot.scope, slot.last_used = sequence.request.scope, self._tick()
        snapshots: list[Snapshot] = [] if source is None else source.snapshots
        slot.snapshots = [each for each in snapshots if each.length <= n_ready]
        sequence.slot = slot.index
        sequence.n_computed = n_ready
        sequence.tier = "device"
        if isinstance(source, State):
            sequence.tier = "disk" if source.is_from_disk else "memory"
            source.is_from_disk = False
        if self.takes_snapshots:
            sequence.snapshot_at = _snapshots_due(sequence, match.n_common)
        self.let_go(sequence)
        return True

    def _slot_for(self, sequence: Sequence, match: Match) -> Slot | None:
        """The slot for a sequence: its source, or the idle one that is to be reused first. `None`
        if a batch must settle one first."""
        source = match.source
        touched = self.read | self.written if self.is_busy or source is not None else set[int]()
        idle = [slot for slot in self.slots if slot.owner is None and slot.index not in touched]
        others = [slot for slot in idle if slot is not source]
        if isinstance(source, Slot):
            if source.index in self.written:
                return None
            if source in idle and (self._takes_over(source, match.n_ready) or not others):
                return source
        partners = self._partners(sequence)
        return min(others, key=lambda each: self._order(each, partners), default=None)

    def _cut(self, slot: Slot, match: Match) -> None:
        """Leave in a slot what its next owner continues from."""
        n_lost = len(slot.kept) - match.n_ready
        if n_lost >= MIN_SHARED_TOKENS:
            self._save_if_likely(slot)
        if n_lost > 0:
            self._truncate(slot, match.n_ready, match.snapshot)

    def _bring(self, match: Match, slot: Slot) -> None:
        """Put into an empty slot what its next owner continues from."""
        source, n_ready, snapshot = match.source, match.n_ready, match.snapshot
        if source is None:
            return
        self.written.add(slot.index)
        if isinstance(source, State):
            self._make_cells(len(source.tokens))
            self.moves.append(Restore(slot.index, source, n_ready, snapshot))
            return
        self.moves.append(Copy(source.index, slot.index, n_ready, snapshot))
        self.read.add(source.index)
        if self.limits.unified:
            share(source, slot, n_ready, self.slots)

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """Take a sequence's slot back. Its cells are kept for reuse or freed."""
        slot = self._taken_from(sequence)
        if keep:
            del sequence.tokens[sequence.n_computed :]
            slot.kept = sequence.tokens  # a copy would touch every token of the conversation
            slot.last_used, slot.is_new = self._tick(), True
        else:
            self._truncate(slot, 0)

    def preempt(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take a running sequence's slot back. With `keep`, what it has computed goes to memory if
        there is room, and stays there until it continues; otherwise it is lost."""
        slot = self._taken_from(sequence)
        if keep:
            slot.kept = sequence.tokens[: sequence.n_computed]
            slot.last_used = self._tick()
            sequence.saved = self.save(slot, is_awaited=True)
        self._truncate(slot, 0)
        sequence.n_computed = 0

    def divide(self, limits: Limits) -> None:
        """Start over in another layout, while all slots are idle. What they keep goes to memory,
        the most recent first, as far as it has room; what no batch has settled is lost."""
        assert self.n_idle == len(self.slots)
        touched = self.read | self.written
        for slot in sorted(self.slots, key=lambda each: each.last_used, reverse=True):
            if slot.kept and slot.index not in touched:
                self.save(slot)
        self.settled()
        self.limits = limits
        self.slots[:] = [Slot(index) for index in range(limits.n_slots)]
        self.moves.append(Divide(limits.n_cells, limits.n_slots, limits.unified))

    def let_go(self, sequence: Sequence) -> None:
        """Unlock the state that a sequence was to continue from."""
        if sequence.saved is not None:
            self.memory.unlock(sequence.saved)
            if not self.limits.prefix_cache:  # no other request continues from it
                self.memory.drop(sequence.saved)
            sequence.saved = None

    def start_over(self, index: int) -> None:
        """A slot's cells are lost: its owner computes from its first token on."""
        slot = self.slots[index]
        slot.kept, slot.snapshots, slot.shared, slot.is_new = [], [], [], False
        if slot.owner is not None:
            slot.owner.n_computed = 0

    def keep_snapshot(self, sequence: Sequence, data: bytes) -> None:
        """Keep a snapshot of a running sequence's memory; the least recently used are evicted."""
        if sequence.slot is None or not 0 < len(data) <= self.memory.most_bytes:
            return
        is_likely = sequence.snapshot_at[sequence.n_computed]
        snapshot = Snapshot(sequence.n_computed, data, self._tick() if is_likely else 0)
        self.slots[sequence.slot].snapshots.append(snapshot)
        self.memory.fit()

    def close_hole(self, seconds_per_pass: float) -> bool:
        """Move a stream of a split pool next to the others, if that saves passes over all weights
        that take longer than the copy (see `_order`). Returns false if none is moved."""
        touched = self.read | self.written
        untouched = [slot for slot in self.slots if slot.index not in touched]
        idle = [slot for slot in untouched if slot.owner is None]
        moves: list[tuple[int, bool, int, int, int]] = []
        for source in untouched:
            stream = source.owner
            if stream is not None and self._is_worth_a_copy(stream, seconds_per_pass):
                partners = self._partners(stream) - {source.index}
                now = _runs_beside(partners, source.index)
                for target in idle:
                    then, is_kept, last_used = self._order(target, partners)
                    moves.append((then - now, is_kept, last_used, source.index, target.index))
        change, _, _, source_index, target_index = min(moves, default=(0, False, 0, 0, 0))
        if change >= 0:
            return False
        source, target = self.slots[source_index], self.slots[target_index]
        if target.kept:
            self._push_out(target)
        stream = source.owner
        assert stream is not None
        self.moves.append(Copy(source.index, target.index, stream.n_computed))
        self.read.add(source.index)
        self.written.add(target.index)
        target.owner, source.owner, stream.slot = stream, None, target.index
        target.scope, target.last_used = source.scope, self._tick()
        self._truncate(source, 0)
        return True

    def _is_worth_a_copy(self, stream: Sequence, seconds_per_pass: float) -> bool:
        """Whether the passes that a stream is likely to save, one a step, outlast the copy."""
        if not stream.n_out or stream.request.deterministic:
            return False  # a prompt that is being computed is not moved
        n_more = min(stream.n_most - len(stream.tokens), stream.n_out + _MORE_TOKENS)
        return n_more * seconds_per_pass > self.limits.copy_seconds

    # --- room --------------------------------------------------------------------------------

    def room(self) -> bool:
        """Free the cells of the least recently used idle slot; false if no idle slot has any."""
        kept = [slot for slot in self.slots if slot.kept]
        if not kept:
            return False
        self._push_out(min(kept, key=lambda each: each.last_used))
        return True

    def clear(self, match: Match) -> None:
        """Move what idle slots keep to memory, once they have most of the used cells of one pool.

        llama.cpp's attention goes over all cells up to the highest used one, whoever's they are:
        beside running streams, idle cells cost time in every step.
        """
        if not self.limits.unified or self.cells_cached <= self.cells_running:
            return
        kept = [slot for slot in self.slots if slot.kept and slot is not match.source]
        for slot in sorted(kept, key=lambda slot: slot.last_used, reverse=True):
            if len(slot.kept) < MIN_SHARED_TOKENS or self.save(slot):
                self._truncate(slot, 0)

    def next_out(self) -> list[Slot]:
        """The slots that the next request would push out of their cells: in one pool all idle ones
        but the most recent, otherwise the oldest if no slot is empty."""
        kept = sorted((s for s in self.slots if s.kept), key=lambda slot: slot.last_used)
        if self.limits.unified:
            return kept[:-1]
        return kept[:1] if all(slot.tokens for slot in self.slots) else []

    def save(self, slot: Slot, *, is_awaited: bool = False) -> State | None:
        """The state of what an idle slot keeps. Its copy is planned, unless memory has it already.

        `None` if it cannot be copied, is too short to be reused, has no room in memory, or would
        take too long to copy. For a request that awaits it, no copy takes too long: to compute it
        again would take longer.
        """
        tokens, memory, limits = slot.kept, self.memory, self.limits
        if len(tokens) < (1 if is_awaited else MIN_SHARED_TOKENS) or slot.index in self.written:
            return None
        for state in () if is_awaited else memory.find(tokens, slot.scope, len(tokens)):
            if limits.cuts_anywhere or len(state.tokens) == len(tokens):
                state.last_used = max(state.last_used, slot.last_used)
                return state
        seconds = self.expected_seconds(slot)
        most = MOST_SECONDS if self.is_busy else _MOST_SECONDS_ALONE
        if not is_awaited and self._copying_seconds + seconds > most:
            self.copying.relax()
            return None
        state = State(tokens, slot.scope, int(self._bytes_per_cell * len(tokens)))
        state.snapshots, state.last_used = list(slot.snapshots), slot.last_used
        state.n_locks, state.is_new = int(is_awaited), slot.is_new
        if state.n_bytes > memory.most_bytes - memory.locked_bytes:
            return None
        if not limits.can_cut(len(tokens), slot.n_cells, slot.first):  # a window has lost cells
            return None
        if not memory.keep(state):
            return None
        self._copying_seconds += seconds
        self.moves.append(Save(slot.index, state))
        return state

    def _push_out(self, slot: Slot) -> None:
        """Free the cells that an idle slot keeps, with a copy in memory if it may come back."""
        self._save_if_likely(slot)
        self._truncate(slot, 0)

    def _save_if_likely(self, slot: Slot) -> None:
        """Copy what a slot loses to memory, if it may come back.

        Running streams wait for a copy. Once as many conversations as there are slots were pushed
        out and none came back, they wait only for one in `n_slots`, to notice when that changes.
        """
        n_slots = len(self.slots)
        if not self.is_busy or self._n_pushed_out < n_slots or self._n_pushed_out % n_slots == 0:
            self.save(slot)
        self._n_pushed_out += 1

    def expected_seconds(self, slot: Slot) -> float:
        """The time to copy what a slot has to memory."""
        return self._bytes_per_cell * slot.n_cells * self.copying.per_byte

    def position(self, index: int, length: int) -> int:
        """The position of the token that follows the first `length` in a slot."""
        # A slot that is emptied may be of an earlier layout, which had more.
        if not length or not self.limits.has_still_tokens:
            return length
        return position_of(self.slots[index].tokens, length)

    # --- called by the carrier and the loop --------------------------------------------------

    def take_moves(self) -> list[Move]:
        moves, self.moves, self._copying_seconds = self.moves, [], 0.0
        return moves

    def settled(self) -> None:
        """llama.cpp has begun a batch, and has made all copies first."""
        self.read.clear()
        self.written.clear()

    def saved(self, state: State, seconds: float) -> None:
        """A copy to memory was made, in `seconds`."""
        self._bytes_per_cell = state.n_bytes / len(state.tokens)
        self.copying.paid(state.n_bytes, seconds)
        self.memory.fit()

    # --- one slot ----------------------------------------------------------------------------

    def _of_slot(self, slot: Slot, n_common: int) -> Match:
        n_ready, owner = min(n_common, slot.n_cells), slot.owner
        snapshot: Snapshot | None = None
        if not self.limits.can_cut(n_ready, slot.n_cells, slot.first):
            n_ready, snapshot = _longest(slot.snapshots, n_ready)
        if n_ready < MIN_SHARED_TOKENS:
            n_ready, snapshot = 0, None
        awaited = None
        if owner is not None and n_common > slot.n_cells:
            if self.limits.cuts_anywhere or self.takes_snapshots:
                awaited = Awaited(owner, n_common)
        return Match(slot if n_ready else None, n_ready, snapshot, n_common, awaited)

    def _of_state(self, state: State, tokens: list[int], most: int) -> Match:
        n_common = common_length(state.tokens, tokens, most)
        if not self.fits_part(len(state.tokens), tokens):
            return Match(n_common=n_common)
        if self.limits.cuts_anywhere or n_common == len(state.tokens):
            return Match(state, n_common, None, n_common)
        return Match(state, *_longest(state.snapshots, n_common), n_common)

    def _gain(self, match: Match) -> float:
        """The time that a match saves, in prompt tokens."""
        source, per_token = match.source, self.pace.seconds_per_prompt_token
        if isinstance(source, State):
            if source.n_locks:  # a request waits for it, or the disk is writing it
                return match.n_ready
            seconds = source.n_bytes * self.copying.per_byte
            return match.n_ready - (seconds / per_token if per_token else MIN_SHARED_TOKENS)
        if source is None or not per_token or self._takes_over(source, match.n_ready):
            return match.n_ready
        return match.n_ready - self.limits.copy_seconds / per_token

    def _takes_over(self, slot: Slot, n_ready: int) -> bool:
        """Whether a prompt takes over this slot itself; the rest of what it keeps is lost."""
        return slot.owner is None and 2 * n_ready >= len(slot.kept)

    def _partners(self, sequence: Sequence) -> set[int]:
        """The indices of the slots whose owners may share a batch with a sequence."""
        adapters = sequence.request.adapters
        owned = ((slot.index, slot.owner) for slot in self.slots)
        return {i for i, owner in owned if owner and owner.request.adapters == adapters}

    def _order(self, slot: Slot, partners: set[int]) -> tuple[int, bool, int]:
        """A sort key for idle slots: the one with the lowest is the first to be reused.

        With a split pool, llama.cpp computes one pass over all weights for each run of neighbouring
        slots in a batch: eight streams in every other slot take eight passes a step. Slots that
        close a hole between `partners` therefore come first, and slots that begin a run last.
        """
        runs = 0 if self.limits.unified else _runs_beside(partners, slot.index)
        return runs, bool(slot.kept), slot.last_used

    def _truncate(self, slot: Slot, length: int, snapshot: Snapshot | None = None) -> None:
        unshare(slot, length, self.slots)
        if not length:
            slot.kept, slot.snapshots, slot.is_new = [], [], False
        if snapshot is not None:
            self.written.add(slot.index)
        self.moves.append(Truncate(slot.index, length, snapshot))

    def _make_cells(self, n_cells: int) -> None:
        """Free cells of one pool until `n_cells` are free, or no idle slot has any."""
        if self.limits.unified:
            while self.cells_running + self.cells_cached + n_cells > self.limits.n_cells:
                if not self.room():
                    return

    def _taken_from(self, sequence: Sequence) -> Slot:
        """Take a sequence's slot away and return it."""
        assert sequence.slot is not None
        slot = self.slots[sequence.slot]
        assert slot.owner is sequence
        slot.owner, sequence.slot = None, None
        return slot

    def _tick(self) -> int:
        self.now += 1
        return self.now


def _runs_beside(used: set[int], index: int) -> int:
    """The change in the number of runs of neighbouring slots when this one is used: -1 between two
    used ones, 1 far off."""
    return 1 - (index - 1 in used) - (index + 1 in used)


def _longest(snapshots: list[Snapshot], most: int) -> tuple[int, Snapshot | None]:
    """The longest snapshot of at most `most` tokens, preceded by its length; else 0 and `None`."""
    fitting = (each for each in snapshots if each.length <= most)
    longest = max(fitting, key=lambda each: each.length, default=None)
    return (longest.length if longest is not None else 0), longest


def _snapshots_due(sequence: Sequence, n_common: int) -> dict[int, bool]:
    """The lengths at which to take snapshots of a new prompt, each with whether a use is likely.

    A use is likely shortly before the prompt's end, after the chat's system prompt, and after a
    prefix that another prompt had, too. The other snapshots are `SPACING` tokens apart.
    """
    if sequence.request.deterministic:
        return {}
    last = len(sequence.tokens) - SNAPSHOT_TAIL
    ends = dict.fromkeys(range(SPACING, last, SPACING), False)
    ends |= {last: True, sequence.n_system: True}
    if n_common:
        ends[n_common] = True
    first = sequence.n_computed + SNAPSHOT_TAIL
    return {
        end: is_likely
        for end, is_likely in ends.items()
        if end >= first and sequence.can_continue_from(end)
    }
