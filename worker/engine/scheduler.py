"""Decides what each step computes. Plain Python: no native code, no clock, no thread, no copy.

A step decodes one token of every running sequence and spends a budget of prompt tokens. Requests
start in the order of arrival. A prompt that shares a prefix with one being computed waits for that
prefix instead of computing it again. Engine thread.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from worker.engine.cache.cache import Cache, Match
from worker.engine.limits import Limits
from worker.engine.pace import Pace
from worker.engine.sequence import Sequence
from worker.engine.step import Chunk, Step, split_budget
from worker.engine.turns import Turns

_MORE_TOKENS = 32
"""A sequence gets a longer part this many tokens before it needs one: a step may draw several."""


class Scheduler:
    def __init__(self, *layouts: Limits) -> None:
        """`layouts` are the limits of each layout of the cells, best first. The last one fits every
        sequence that is accepted at all."""
        self._layouts, limits = layouts, layouts[0]
        self.pace = Pace(limits.inter_token_seconds, limits.prefill_budget)
        self.cache = Cache(limits, self.pace)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In the order of admission: the last is the youngest."""
        self._is_full = False
        """Whether the first in the queue lacked a slot or cells, and none were freed since."""
        self._has_nan = False
        """Whether NaN was computed: the next step begins with empty cells."""
        self._trials: set[Sequence] = set()
        """Those that compute their next token alone, because NaN was computed while they ran."""
        self._n_admitted = 0
        """How often a sequence was given cells since all cells were last emptied."""
        self._is_placed = True
        """Whether the last search found no hole to close, and no sequence came or went since."""
        self._turns = Turns(self.pace)

    # --- state ---------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """The limits of the current layout."""
        return self.cache.limits

    @property
    def has_work(self) -> bool:
        """Whether a step could compute anything now. A sequence that waits for the disk reserves a
        slot, so only the first `n_slots` in the queue count."""
        if self.running:
            return True
        return any(not each.awaits_disk for each in islice(self.waiting, self.limits.n_slots))

    # --- sequences come and go -------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence, *, keep_cells: bool) -> None:
        """Remove a sequence, waiting or running. Its cells are kept for reuse or freed."""
        self._is_full = False
        if sequence.slot is None:
            self.waiting.remove(sequence)
            sequence.awaits_disk = False
            self.cache.let_go(sequence)
            return
        self._stop(sequence)
        keep = keep_cells and self.limits.prefix_cache and not sequence.request.deterministic
        self.cache.release(sequence, keep=keep)

    def preempt_youngest(self) -> Sequence | None:
        """Free the youngest running sequence's cells and return it to the head of the queue, to
        continue later. `None` if it is the only one: it would need the same room again."""
        if len(self.running) < 2:
            return None
        youngest = self.running[-1]
        self._preempt(youngest)
        return youngest

    def _preempt(self, sequence: Sequence, *, keep: bool = True) -> None:
        self._stop(sequence)
        keep = keep and not sequence.is_on_trial  # what it has may hold NaN
        self.cache.preempt(sequence, keep=keep)
        self.waiting.appendleft(sequence)

    def nan_is_its_own(self, sequence: Sequence) -> bool:
        """Whether NaN that a sequence has computed must be its own: no other sequence has had cells
        since all were emptied."""
        return sequence.is_on_trial and self._n_admitted == 1

    def put_on_trial(self, first: Sequence) -> None:
        """Make all running sequences start over in empty cells, and each compute a token alone:
        `first` has computed NaN, which attention masks do not keep from the others."""
        self._has_nan = True
        self.running.remove(first)
        self.running.insert(0, first)
        for sequence in self.running:
            sequence.tried_at = len(sequence.tokens)
        self._trials.update(self.running)

    # --- planning ----------------------------------------------------------------------------

    def plan(self) -> Step:
        """The next step. Until `advance` confirms it, only the ownership of slots has changed."""
        step = Step()
        if self._has_nan:
            self._has_nan = False
            self._start_over(self.limits, keep=False)
        if self._trials:
            self._trials &= {s for s in (*self.running, *self.waiting) if s.is_on_trial}
        if len(self._layouts) > 1 and (self.cache.is_settled or not self.running):
            self._lay_out()
        if self.waiting and not self._is_full:
            self._start_waiting(step)
        limits = self.cache.limits
        if not self._is_placed and limits.cuts_anywhere and not limits.unified:
            # One copy a step, as running streams wait for it. In one pool, order does not matter.
            self._is_placed = not self.cache.close_hole(self.pace.seconds_per_pass)
        if self.cache.moves:
            step.moves = self.cache.take_moves()
        prefilling: list[Sequence] = []
        chunks = step.chunks
        are_shared = self._turns.are_shared
        group = self._turns.next() if are_shared else self.running
        if self._trials:
            group = [each for each in self.running if each.is_on_trial] or group
        # In a split pool, sequences with different numbers of rows would take a pass each.
        may_differ = len(group) == 1 or limits.one_pass
        n_free = limits.batch - len(group)  # rows left when each sequence has one
        for sequence in group:
            n_computed, n_tokens = sequence.n_computed, len(sequence.tokens)
            if n_tokens - n_computed == 1 and n_tokens > sequence.n_prompt:  # the usual case
                chunks.append(Chunk(sequence, n_computed, 1))
            elif sequence.is_decoding:
                n_tokens = min(sequence.n_next, 1 + n_free) if may_differ else 1
                chunks.append(Chunk(sequence, n_computed, n_tokens))
                n_free -= n_tokens - 1
            else:
                prefilling.append(sequence)
        if prefilling:
            self._plan_prompts(prefilling, n_free, step)
        if are_shared and (step.has_prompts or not step.chunks):
            self._turns.end()
        return step

    def advance(self, step: Step) -> None:
        """Record that the step's chunks were computed."""
        for sequence, _, n_tokens in step.chunks:
            sequence.n_computed += n_tokens

    def _plan_prompts(self, prefilling: list[Sequence], n_free: int, step: Step) -> None:
        """Add parts of prompts to a step. `n_free` rows are left when each sequence has one."""
        if any([s.spans for s in prefilling]):
            prefilling = self._plan_media(prefilling, step)
        if not prefilling:
            return
        step.has_prompts = True
        n_streams = sum([s.is_decoding for s in self.running])
        budget = self.pace.budget(n_streams, len(self.waiting) + len(prefilling) - 1)
        if prefilling[0].request.deterministic:  # alone; the sizes of its chunks affect rounding
            budget = self.limits.prefill_budget
        budget = min(budget, n_free + len(prefilling))
        step.chunks += split_budget(prefilling, budget, oldest_first=self._turns.oldest_first())

    def _plan_media(self, prefilling: list[Sequence], step: Step) -> list[Sequence]:
        """Returns the prompts that continue with tokens, or none if this step is for a part of a
        medium. That part is the step's only chunk: the projector runs first, and embeddings need a
        batch of their own."""
        at_media = [s for s in prefilling if s.next_span is not None]
        is_beside = not self._trials and any([s.next_span is None for s in self.running])
        if not at_media or (is_beside and not self.pace.may_encode):
            return [s for s in prefilling if s.next_span is None]
        first = at_media[0]
        n_tokens = min(first.n_next, self.limits.batch)
        step.chunks = [Chunk(first, first.n_computed, n_tokens)]
        step.span, step.has_prompts = first.next_span, True
        return []

    # --- the layout of the cells ---------------------------------------------------------------

    def _lay_out(self) -> None:
        """Change the layout when a sequence needs a longer part, and back when none does any more:
        each long sequence costs two changes at most.

        It changes back only if more parts help: a sequence that runs alone has no others' cells in
        its way, and a layout with a part for each sequence is good enough.
        """
        n_slots = max(each.n_slots for each in self._layouts)
        starting = islice(self.waiting, n_slots - len(self.running))
        alive = [*self.running, *starting]
        longest = max(map(_needs, alive), default=0)
        n_without_loss = 1 if self.limits.unified else self.limits.n_slots
        if longest <= self.limits.longest and len(alive) <= n_without_loss:
            return
        fitting = (each for each in self._layouts if longest <= each.longest)
        limits = next(fitting, self._layouts[-1])
        if limits is not self.limits:
            self._start_over(limits)

    def _start_over(self, limits: Limits, *, keep: bool = True) -> None:
        """Lay the cells out, empty. With `keep`, what running sequences have computed is saved."""
        while self.running:  # the oldest comes last, and so to the head of the queue
            self._preempt(self.running[-1], keep=keep)
        self.cache.divide(limits)
        self._n_admitted = 0

    # --- admission ---------------------------------------------------------------------------

    def _start_waiting(self, step: Step) -> None:
        """Start waiting sequences in order of arrival, while slots and cells last.

        A sequence that waits for the disk or for a common prefix keeps a slot reserved, so that
        later arrivals cannot overtake it forever.
        """
        cache = self.cache
        n_idle, n_reserved = cache.n_idle, 0
        for sequence in list(self.waiting):
            if n_reserved == n_idle:
                self._is_full = not n_idle
                return
            if self._trials and not sequence.is_on_trial:
                continue
            if self._trials and any([each.is_on_trial for each in self.running]):
                return  # one trial at a time
            if _needs(sequence) > self.limits.longest and self.limits is not self._layouts[-1]:
                return  # the next step changes the layout for it
            match = self._match(sequence)
            if match is None:
                n_reserved += 1
                continue
            match = self._fitting(sequence, match)
            if match is None:
                self._is_full = not n_reserved
                return
            if not step.started:
                cache.clear(match)
            if not cache.acquire(sequence, match):
                # The next step can. But if nothing runs, no batch settles what it waits for.
                if self.running or not cache.acquire(sequence, Match()):
                    return
            self._start(sequence)
            step.started.append(sequence)
            n_idle -= 1

    def _match(self, sequence: Sequence) -> Match | None:
        """What a sequence continues from; `None` while that is still being read or computed."""
        if sequence.awaits_disk or (sequence.awaited is not None and sequence.awaited.is_due):
            return None
        match = self.cache.match(sequence)
        sequence.awaited = match.awaited
        if match.awaited is None:
            return match
        if not self.limits.cuts_anywhere:
            match.awaited.owner.snapshot_at[match.awaited.length] = True
        return None

    def _fitting(self, sequence: Sequence, match: Match) -> Match | None:
        """The match, or an empty one if only that fits beside the running sequences: a state needs
        cells for all its tokens, even those that differ. `None` if neither fits."""
        if not self.running or self.cache.fits(sequence, match):
            return match
        match = Match(n_common=match.n_common)
        return match if sequence.saved is None and self.cache.fits(sequence, match) else None

    def _start(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self._turns.join(sequence)
        self._is_placed = False
        self._n_admitted += 1

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._turns.leave(sequence)
        self._is_full = self._is_placed = False


def _needs(sequence: Sequence) -> int:
    """The cells that a sequence needs now and soon. Its last token is drawn but never computed."""
    return min(len(sequence.tokens) + _MORE_TOKENS, max(sequence.n_most - 1, len(sequence.tokens)))
