"""Decides what each step computes. Plain Python: no native code, no clock, no thread.

A step decodes one token of every running sequence first, then spends a budget of prompt tokens.
Requests start in the order of their arrival; one whose prompt begins like a prompt that is being
computed right now waits for that part instead of computing it again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from worker.engine.prefix_cache import Match, Slot, find_match
from worker.engine.sequence import Sequence


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence, one row each."""

    sequence: Sequence
    start: int
    n_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.n_tokens

    @property
    def wants_logits(self) -> bool:
        return self.end == len(self.sequence.tokens)


class Truncate(NamedTuple):
    """Keep the first `length` cells of a slot."""

    slot: int
    length: int


class Copy(NamedTuple):
    """Give the empty slot `target` the first `length` cells of `source`."""

    source: int
    target: int
    length: int


@dataclass(slots=True)
class Plan:
    """One step: cell operations in order, then one batch."""

    moves: list[Truncate | Copy] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    started: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences that got a slot, with the number of prompt tokens that they need not compute."""

    @property
    def main_prompt(self) -> int | None:
        """The request whose prompt is more than half of the batch."""
        sizes = [chunk.n_tokens for chunk in self.chunks]
        largest = max(sizes)
        if largest == 1 or 2 * largest <= sum(sizes):
            return None
        return self.chunks[sizes.index(largest)].sequence.request_id


@dataclass(frozen=True, slots=True)
class Limits:
    n_slots: int
    n_cells: int
    """KV cells of all slots together."""
    batch: int
    """Rows in one batch."""
    prefill_alone: int
    """Tokens of a prompt in a step that is all its own."""
    prefill_budget: int
    """Prompt tokens in any other step."""
    prefix_cache: bool = True


class Scheduler:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.slots = [Slot(index) for index in range(limits.n_slots)]
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In the order of admission: the last is the youngest."""
        self._clock = 0
        self._admissions = 0
        self._freed: list[Truncate] = []
        self._alone_last = False

    # --- what is there -------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._freed)

    @property
    def waiting_prompt_tokens(self) -> int:
        return sum(sequence.n_left for sequence in self.waiting)

    @property
    def cells_running(self) -> int:
        return sum([sequence.n_computed for sequence in self.running])

    @property
    def cells_cached(self) -> int:
        """Kept only for reuse."""
        return sum([len(slot.kept) for slot in self.slots])

    # --- sequences come and go -------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence, *, keep_cells: bool) -> None:
        """Take a sequence out, wherever it is. Its cells stay for reuse or become free."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        slot = self._leave_slot(sequence)
        if keep_cells and self.limits.prefix_cache and not sequence.request.deterministic:
            slot.kept = sequence.tokens[: sequence.n_computed]
            slot.last_used = self._tick()
        else:
            self._empty(slot)

    def preempt_youngest(self) -> Sequence | None:
        """Send the youngest running sequence back to the head of the queue to make room.

        It loses its cells but no token; `None` when only one is running, which would only come
        back to the same place.
        """
        if len(self.running) < 2:
            return None
        youngest = self.running[-1]
        self._empty(self._leave_slot(youngest))
        youngest.n_computed = 0
        self.waiting.appendleft(youngest)
        return youngest

    def drop_cached(self) -> bool:
        """Free the cells of the least recently used idle slot; false when there are none."""
        idle = [slot for slot in self.slots if slot.kept]
        if not idle:
            return False
        self._empty(min(idle, key=lambda slot: slot.last_used))
        return True

    # --- planning ----------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The next step. Until `advance` confirms it, only slots have changed hands."""
        plan = self.take_freed()
        self._admit_waiting(plan)
        prefilling: list[Sequence] = []
        for sequence in self._next_group():
            if sequence.is_decoding:
                plan.chunks.append(Chunk(sequence, sequence.n_computed, 1))
            else:
                prefilling.append(sequence)
        if prefilling:
            budget = self._prompt_budget(len(plan.chunks), len(prefilling))
            plan.chunks += _share(prefilling, budget)
        return plan

    def take_freed(self) -> Plan:
        """The truncations that are due, as a plan without a batch."""
        freed, self._freed = self._freed, []
        return Plan(moves=[*freed])

    def advance(self, plan: Plan) -> None:
        """The batch of the plan was computed."""
        for sequence, _, n_tokens in plan.chunks:
            sequence.n_computed += n_tokens

    def shrink(self, plan: Plan) -> Plan | None:
        """A smaller plan after «no room»: nothing but decode rows if there are any, else half
        of the prompt tokens; `None` when it cannot get smaller."""
        decodes = [chunk for chunk in plan.chunks if chunk.sequence.is_decoding]
        prefills = [chunk for chunk in plan.chunks if not chunk.sequence.is_decoding]
        if decodes and prefills:
            return Plan(chunks=decodes)
        n_tokens = sum(chunk.n_tokens for chunk in prefills) // 2
        if n_tokens == 0:
            return None
        return Plan(chunks=_share([chunk.sequence for chunk in prefills], n_tokens))

    # --- admission ---------------------------------------------------------------------------

    def _admit_waiting(self, plan: Plan) -> None:
        """Start waiting sequences in order of arrival, as far as slots and cells go.

        One that waits for a common beginning keeps a slot reserved, so that later arrivals do
        not overtake it for good.
        """
        if not self.waiting:
            return
        n_free = sum(slot.is_idle for slot in self.slots)
        n_cells = self.limits.n_cells - sum(len(s.tokens) for s in self.running)
        for sequence in list(self.waiting):
            # One more cell than its tokens: for the next one that is sampled.
            n_cells -= len(sequence.tokens) + 1
            if n_free == 0 or (n_cells < 0 and self.running):
                return
            n_free -= 1
            match = self._match(sequence)
            if match is None or not match.is_worth_waiting:
                self._admit(sequence, match, plan)

    def _match(self, sequence: Sequence) -> Match | None:
        if not self.limits.prefix_cache or sequence.request.deterministic:
            return None
        return find_match(self.slots, sequence)

    def _admit(self, sequence: Sequence, match: Match | None, plan: Plan) -> None:
        idle = [slot for slot in self.slots if slot.is_idle]
        n_cached = match.n_ready if match is not None else 0
        if match is not None and match.slot.is_idle and self._may_take_over(match, idle):
            slot = match.slot
            if n_cached < len(slot.kept):
                plan.moves.append(Truncate(slot.index, n_cached))
        else:
            others = [slot for slot in idle if match is None or slot is not match.slot]
            slot = min(
                others, key=lambda s: (not self._is_beside_running(s), bool(s.kept), s.last_used)
            )
            if slot.kept:
                plan.moves.append(Truncate(slot.index, 0))
            if match is not None and n_cached:
                plan.moves.append(Copy(match.slot.index, slot.index, n_cached))
                match.slot.last_used = self._tick()
        self.waiting.remove(sequence)
        self.running.append(sequence)
        slot.owner, slot.kept, slot.salt = sequence, [], sequence.request.cache_salt
        slot.last_used = self._tick()
        sequence.slot, sequence.n_computed = slot.index, n_cached
        self._admissions += 1
        sequence.admission = self._admissions
        plan.started.append((sequence, n_cached))

    def _is_beside_running(self, slot: Slot) -> bool:
        """Whether the slots in use stay one row without holes. With a split cache llama.cpp makes
        a pass over all weights for every such row; empty slots far off would be a poor saving."""
        neighbours = self.slots[max(slot.index - 1, 0) : slot.index + 2]
        return not self.running or any(not neighbour.is_idle for neighbour in neighbours)

    @staticmethod
    def _may_take_over(match: Match, idle: list[Slot]) -> bool:
        """An idle slot is taken over when most of it is used, or when there is no other."""
        return 2 * match.n_ready >= len(match.slot.kept) or len(idle) == 1

    # --- the batch ---------------------------------------------------------------------------

    def _next_group(self) -> list[Sequence]:
        """The sequences of this step: all, but for those that must be alone in their batch.

        Deterministic sequences take turns with the rest: every other step is theirs.
        """
        alone = [s for s in self.running if s.request.deterministic]
        if not alone:
            return self.running
        rest = [s for s in self.running if not s.request.deterministic]
        self._alone_last = not self._alone_last or not rest
        return alone[:1] if self._alone_last else rest

    def _prompt_budget(self, n_decoding: int, n_prefilling: int) -> int:
        """Prompt tokens of a step.

        Running streams wait for one `prefill_budget` a step. So do prompts for each other: two
        after another answer sooner on average than both at once. Only one that is alone gets more.
        """
        is_alone = n_decoding == 0 and n_prefilling == 1
        budget = self.limits.prefill_alone if is_alone else self.limits.prefill_budget
        return min(budget, self.limits.batch - n_decoding)

    def _leave_slot(self, sequence: Sequence) -> Slot:
        assert sequence.slot is not None
        slot = self.slots[sequence.slot]
        assert slot.owner is sequence
        self.running.remove(sequence)
        slot.owner, sequence.slot = None, None
        return slot

    def _empty(self, slot: Slot) -> None:
        slot.kept = []
        self._freed.append(Truncate(slot.index, 0))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _share(sequences: list[Sequence], budget: int) -> list[Chunk]:
    """Split a budget of prompt tokens: half of it is the oldest prompt's, the rest goes to the
    prompts with the least left to compute.

    So a short prompt behind a long one starts to answer soon, and the long one always moves on.
    """
    if not sequences or budget <= 0:
        return []
    oldest = min(sequences, key=lambda sequence: sequence.admission)
    shares = {id(oldest): min(oldest.n_left, (budget + 1) // 2)}
    budget -= shares[id(oldest)]
    for sequence in sorted(sequences, key=lambda s: (s.n_left, s.admission)):
        taken = shares.get(id(sequence), 0)
        share = min(sequence.n_left - taken, budget)
        shares[id(sequence)] = taken + share
        budget -= share
    ordered = sorted(sequences, key=lambda sequence: sequence.admission)
    return [Chunk(s, s.n_computed, shares[id(s)]) for s in ordered if shares[id(s)]]
