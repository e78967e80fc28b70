"""Decides what each step computes. Plain Python: no native code, no clock, no thread.

A step decodes one token of every running sequence and spends a budget of prompt tokens. Requests
start in the order of arrival. A prompt that begins like one that is being computed waits for that
part instead of computing it again.
"""

from __future__ import annotations

from collections import deque

from worker.engine.backend import Backend
from worker.engine.kv_store.keeper import Keeper, Restorable
from worker.engine.limits import Limits
from worker.engine.pace import Pace
from worker.engine.placement import MORE_TOKENS, added_runs, best_moves, kept_seconds
from worker.engine.prefix_cache import Match, Slot, find_match, leave_a_tile
from worker.engine.prompts import Prompts
from worker.engine.sequence import Sequence
from worker.engine.shelf import Shelf
from worker.engine.snapshots import Snapshots
from worker.engine.step import Chunk, Copy, Restore, Snapshot, Step, Truncate


class Scheduler:
    def __init__(self, limits: Limits, backend: Backend, keeper: Keeper | None = None) -> None:
        self.limits, self._backend, self._keeper = limits, backend, keeper
        self.slots = [Slot(index) for index in range(limits.n_slots)]
        takes_any = not backend.cuts_anywhere and limits.snapshot_bytes > 0
        self._snapshots = Snapshots(self.slots, limits.snapshot_bytes) if takes_any else None
        self.shelf = Shelf(backend, limits.shelf_bytes)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In the order of admission: the last is the youngest."""
        self._clock = 0
        self._admissions = 0
        self._emptied: list[Truncate] = []
        self._alone_last = False
        self._is_placed = True
        """No sequence has started or ended since the last search for holes."""
        self._n_alone = 0
        """Running sequences that must be alone in their batch."""
        self._only_waits = False
        """Nothing could be computed in the last step."""
        self.pace = Pace(limits.inter_token_target, limits.prefill_budget)
        self._prompts = Prompts(limits, backend, self.pace)

    # --- state ---------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether something can be done before the next call or arrival."""
        if self._keeper is not None and self._keeper.is_reading and self._only_waits:
            return False
        return bool(self.waiting or self.running or self._emptied)

    @property
    def waiting_prompt_tokens(self) -> int:
        return sum(sequence.n_left for sequence in self.waiting)

    @property
    def cells_running(self) -> int:
        return sum([sequence.n_computed - sequence.n_shared for sequence in self.running])

    @property
    def cells_cached(self) -> int:
        """Cells that are kept only for reuse."""
        return sum([len(slot.kept) for slot in self.slots])

    # --- sequences come and go -------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self._only_waits = False

    def remove(self, sequence: Sequence, *, keep_cells: bool) -> None:
        """Remove a sequence, waiting or running. Its cells are kept for reuse or freed."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            if self._keeper is not None:
                self._keeper.drop(sequence)
            return
        slot = self._leave_slot(sequence)
        if keep_cells and self.limits.prefix_cache and not sequence.request.deterministic:
            del sequence.tokens[sequence.n_computed :]
            slot.kept = sequence.tokens  # a copy would touch every token of the conversation
            slot.last_used, slot.is_unsaved = self._tick(), True
        else:
            self._empty(slot)

    def start_over(self, index: int) -> None:
        """Compute a slot's sequence from its first token on: its cells are lost."""
        slot = self.slots[index]
        slot.kept, slot.snapshots = [], []
        if slot.owner is not None:
            slot.owner.n_computed = slot.owner.n_cached = slot.owner.n_shared = 0

    def preempt_youngest(self) -> Sequence | None:
        """Return the youngest running sequence to the head of the queue: it loses its cells, and no
        token. `None` if it is the only one, which would need the same room again."""
        if len(self.running) < 2:
            return None
        youngest = self.running[-1]
        self._empty(self._leave_slot(youngest))
        youngest.n_computed = youngest.n_shared = 0
        self.waiting.appendleft(youngest)
        return youngest

    def drop_cached(self) -> bool:
        """Free the cells of the least recently used idle slot; false if no idle slot has any."""
        idle = [slot for slot in self.slots if slot.kept]
        if not idle:
            return False
        self._empty(min(idle, key=lambda slot: slot.last_used))
        return True

    # --- planning ----------------------------------------------------------------------------

    def plan(self) -> Step:
        """The next step. Until `advance` confirms it, only the ownership of slots has changed."""
        step = Step(moves=[*self.take_emptied()])
        self._admit_waiting(step)
        self._close_holes(step)
        prefilling: list[Sequence] = []
        chunks = step.chunks
        for sequence in self._next_group() if self._n_alone else self.running:
            n_computed, n_tokens = sequence.n_computed, len(sequence.tokens)
            if n_tokens - n_computed == 1 and n_tokens > sequence.n_prompt:  # `is_decoding`
                chunks.append(Chunk(sequence, n_computed, 1))
            else:
                prefilling.append(sequence)
        if prefilling:
            step.tells_of_prompts = any([s.tells_of_prompt for s in prefilling])
            chunks += self._prompts.chunks(prefilling, beside=chunks, n_waiting=len(self.waiting))
        self._only_waits = not chunks
        return step

    def take_emptied(self) -> list[Truncate]:
        """The slots emptied since the last call, whose cells must be freed."""
        emptied, self._emptied = self._emptied, []
        return emptied

    def advance(self, step: Step) -> list[Sequence]:
        """Record that the step was computed; returns the sequences to take a snapshot of."""
        for sequence, _, n_tokens in step.chunks:
            sequence.n_computed += n_tokens
        if self._snapshots is None:
            return []
        return [s for s, _, _ in step.chunks if s.n_computed in s.snapshot_at]

    def keep_snapshot(self, sequence: Sequence, state: bytes) -> None:
        """Keep a snapshot of a sequence's memory."""
        if self._snapshots is not None and sequence.slot is not None:
            is_likely = sequence.snapshot_at[sequence.n_computed]
            snapshot = Snapshot(sequence.n_computed, state, self._tick() if is_likely else 0)
            self._snapshots.keep(self.slots[sequence.slot], snapshot)

    # --- admission ---------------------------------------------------------------------------

    def _admit_waiting(self, step: Step) -> None:
        """Start waiting sequences in order of arrival, while slots and cells last.

        One that waits for a common beginning keeps a slot reserved, so that later arrivals cannot
        overtake it for ever.
        """
        if not self.waiting:
            return
        n_free = sum(slot.is_idle for slot in self.slots)
        n_cells = self.limits.n_cells - sum(len(s.tokens) - s.n_shared for s in self.running)
        for sequence in list(self.waiting):
            if n_free == 0:
                return
            n_free -= 1
            match = self._match(sequence)
            shelved = self.shelf.find(sequence, match, n_cells, self.pace.seconds_per_prompt_token)
            # One more cell than tokens: for the next token that is sampled.
            n_cells -= len(sequence.tokens) + 1 - (self._n_shared(match) if not shelved else 0)
            if n_cells < 0 and self.running:
                return
            keeper, is_busy = self._keeper, bool(self.running)
            if shelved is not None:
                if not step.restores:  # one copy a step, so that running streams go on
                    self._admit(sequence, None, shelved, step)
                continue
            if keeper is not None and keeper.awaits(sequence, match, is_busy=is_busy):
                continue
            if match is None or not self._waits_for(match, step):
                stored = keeper.take(sequence, match) if keeper is not None else None
                self._admit(sequence, match if stored is None else None, stored, step)

    def _match(self, sequence: Sequence) -> Match | None:
        if not self.limits.prefix_cache or not sequence.may_reuse:
            return None
        snapshots, backend = self._snapshots is not None, self._backend
        match = find_match(self.slots, sequence, backend, snapshots=snapshots)
        is_tiled = self.limits.tiled and backend.cuts_anywhere
        return leave_a_tile(match, len(sequence.tokens)) if match and is_tiled else match

    def _n_shared(self, match: Match | None) -> int:
        """Cells of a running sequence that the next one will share."""
        if match is None or match.slot.is_idle or not self.limits.unified:
            return 0
        return match.n_ready

    def _waits_for(self, match: Match, step: Step) -> bool:
        """Whether a prompt waits until another sequence has computed their common beginning."""
        owner = match.slot.owner
        if owner is not None and owner in step.started and step.restores:
            return True  # what is restored may fail, and then there is nothing to copy
        if owner is None or self._backend.cuts_anywhere:
            return match.is_worth_waiting
        if match.is_worth_waiting:
            owner.snapshot_at[match.n_common] = True
            return True
        return owner in step.started  # its memory holds nothing yet

    def _admit(
        self, sequence: Sequence, match: Match | None, stored: Restorable | None, step: Step
    ) -> None:
        n_shared = self._n_shared(match)
        if not step.started:
            self._clear_pool(match, step)
        placed = self._place(match, step) if stored is None else self._restore(stored, step)
        slot, n_cached, snapshots = placed
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self._n_alone += sequence.request.deterministic
        self._is_placed = False
        slot.owner, slot.kept, slot.salt = sequence, [], sequence.request.cache_salt
        slot.is_unsaved = False
        slot.snapshots = [each for each in snapshots if each.length <= n_cached]
        slot.last_used = self._tick()
        sequence.slot = slot.index
        sequence.n_shared = min(n_shared, n_cached)
        sequence.n_cached = sequence.n_computed = n_cached
        if self._snapshots is not None:
            sequence.snapshot_at = self._snapshots.due(sequence, match)
        self._admissions += 1
        sequence.admission = self._admissions
        step.started.append(sequence)

    def _clear_pool(self, match: Match | None, step: Step) -> None:
        """Put aside what idle slots keep for others, once most used cells of the pool are such."""
        if not self.limits.shelf_bytes or self.cells_cached <= self.cells_running:
            return
        kept = [s for s in self.slots if s.kept and (match is None or s is not match.slot)]
        if self._keeper is not None:
            kept = [slot for slot in kept if not slot.is_unsaved]
        for slot in self.shelf.put_all(kept, self.slots, is_busy=bool(self.running)):
            self._empty(slot)
        step.moves += self.take_emptied()

    def _place(self, match: Match | None, step: Step) -> tuple[Slot, int, list[Snapshot]]:
        """Choose a slot and fill it with reusable cells: (slot, number of tokens, snapshots)."""
        idle = [slot for slot in self.slots if slot.is_idle]
        if match is not None and match.slot.is_idle and (match.uses_most or len(idle) == 1):
            if match.n_ready < len(match.slot.kept):
                step.moves.append(Truncate(match.slot.index, match.n_ready, self._used(match)))
            return match.slot, match.n_ready, match.slot.snapshots
        others = [slot for slot in idle if match is None or slot is not match.slot]
        slot = self._emptied_slot(others, step)
        if match is None or not match.n_ready:
            return slot, 0, []
        if match.n_ready * self.pace.seconds_per_prompt_token < self.limits.copy_seconds:
            return slot, 0, []
        if match.snapshot is not None and not self._backend.copies_snapshots:
            return slot, 0, []
        step.moves.append(Copy(match.slot.index, slot.index, match.n_ready, self._used(match)))
        match.slot.last_used = self._tick()
        return slot, match.n_ready, match.slot.snapshots

    def _restore(self, stored: Restorable, step: Step) -> tuple[Slot, int, list[Snapshot]]:
        """Fill an idle slot with a stored prefix: (slot, tokens, snapshots)."""
        prefix, length = stored.prefix, stored.length
        self.shelf.use(prefix, self._tick())
        most = self.limits.n_cells - len(prefix.tokens)
        while self.limits.unified and self.cells_running + self.cells_cached > most:
            if not self.drop_cached():
                break
        step.moves += self.take_emptied()
        slot = self._emptied_slot([slot for slot in self.slots if slot.is_idle], step)
        step.moves.append(Restore(slot.index, prefix.state, length, stored.snapshot))
        return slot, length, list(prefix.snapshots)

    def _emptied_slot(self, slots: list[Slot], step: Step) -> Slot:
        """The best of these idle slots, emptied."""
        used = {s.slot for s in self.running if s.slot is not None}
        slot = min(slots, key=lambda each: self._price(each, used))
        if slot.kept:
            step.moves.append(Truncate(slot.index, 0))
        return slot

    def _used(self, match: Match) -> Snapshot | None:
        if match.snapshot is not None:
            match.snapshot.last_used = self._tick()
        return match.snapshot

    def _price(self, slot: Slot, used: set[int]) -> tuple[float, int, bool, int]:
        """The seconds that a new sequence in an idle slot costs beside the used ones; then the
        rest of the order."""
        runs = added_runs(used, slot.index) if used and not self.limits.unified else 0
        passes = runs * MORE_TOKENS * self.pace.seconds_per_pass
        return passes + self._worth(slot), runs, bool(slot.kept), slot.last_used

    def _worth(self, slot: Slot) -> float:
        rounds = (self._clock - slot.last_used) / (2 * len(self.slots))
        return kept_seconds(slot, rounds, self.pace.seconds_per_prompt_token)

    def _close_holes(self, step: Step) -> None:
        """Move streams together if that saves more time than the copies and the lost cells cost."""
        if self._is_placed or self.limits.unified or not self._backend.cuts_anywhere:
            return
        self._is_placed = True  # until a sequence starts or ends
        found = best_moves(self.slots)
        if found is None or found.saves(self.pace.seconds_per_pass) <= sum(
            self.limits.copy_seconds + self._worth(slot) for _, _, slot in found.moves
        ):
            return
        self._is_placed = False  # there may be more to do in the next step
        found.carry_out(step, self._tick())

    # --- the batch ---------------------------------------------------------------------------

    def _next_group(self) -> list[Sequence]:
        """The sequences of this step while some must be alone in their batch.

        Deterministic sequences alternate with the rest: every other step is theirs.
        """
        alone = [s for s in self.running if s.request.deterministic]
        rest = [s for s in self.running if not s.request.deterministic]
        self._alone_last = not self._alone_last or not rest
        return alone[:1] if self._alone_last else rest

    def _leave_slot(self, sequence: Sequence) -> Slot:
        assert sequence.slot is not None
        slot = self.slots[sequence.slot]
        assert slot.owner is sequence
        self.running.remove(sequence)
        self._n_alone -= sequence.request.deterministic
        self._is_placed = False
        slot.owner, sequence.slot = None, None
        return slot

    def _empty(self, slot: Slot) -> None:
        slot.kept, slot.snapshots, slot.is_unsaved = [], [], False
        self._emptied.append(Truncate(slot.index, 0))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
