"""The engine's loop: plan, decode, sample, detokenise, send. It owns the engine thread.

Other threads call only `submit`, `cancel`, `end_reasoning` and `call`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import NoReturn

from worker.engine.answers import Answers, Drawn, prompt_events
from worker.engine.cache.carrier import Carrier
from worker.engine.cache.disk import Disk
from worker.engine.cache.disk_traffic import DiskTraffic
from worker.engine.cache.moves import Truncate
from worker.engine.media.span import Span
from worker.engine.model_runner import ModelRunner
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.speculation.speculation import Drafter, Speculation
from worker.engine.step import Chunk, main_prompt, shrink
from worker.errors import Cancelled, InferenceFailed, InferenceTimeout, VramOom, WorkerError
from worker.llama.draw import NotANumber
from worker.observability.logs import get_logger
from worker.wire.black_box import LOOP, BlackBox
from worker.wire.messages import Event, Failed, Started, Stats

log = get_logger()

_STATS_SECONDS = 0.2
"""Shortest time between two `Stats` while there is work: building one costs a tenth of a step's own
overhead."""

_WAKE_SECONDS = 0.5
"""While every request waits for the disk, the loop wakes this often to check deadlines and to send
`Stats`, which show that it is alive."""


class Loop:
    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        send: Callable[[list[Event]], None],
        clock: Callable[[], float] = time.monotonic,
        black_box: BlackBox | None = None,
        disk: Disk | None = None,
        drafter: Drafter | None = None,
        before_step: Callable[[float], None] | None = None,
    ) -> None:
        """`before_step` is called with the current time before anything is computed."""
        self._runner, self._scheduler = runner, scheduler
        self._before_step = before_step
        self._send, self._clock = send, clock
        self.carrier = Carrier(scheduler.cache, runner.cells, clock)
        self.traffic: DiskTraffic | None = None
        if disk is not None:
            self.traffic = DiskTraffic(disk, scheduler.cache, self.carrier, self.call, clock)
        self.speculation: Speculation | None = None
        self._cuts_anywhere = runner.memory_kind.cuts_anywhere
        self._n_held: dict[Sequence, int] = {}
        """The number of tokens in the cells of each sequence whose guesses this step computed."""
        if drafter is not None and (most_back := runner.memory_kind.most_back):
            most_rows = min(scheduler.limits.batch, runner.rows_a_pass)
            self.speculation = Speculation(
                drafter, runner.is_eog, scheduler.pace, most_rows, clock, most_back
            )
        self._in_hand = (black_box or BlackBox()).in_hand
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sequences: dict[int, Sequence] = {}
        self._events: list[Event] = []
        self._answers, self._pace = Answers(runner), scheduler.pace
        self._n_deadlines = self._steps = 0
        self._batch_seconds = 0.0
        """The time that the last computed batch took."""
        self._decode_seconds = self._sample_seconds = self._overhead_seconds = 0.0
        self._n_encoded, self._encode_seconds = 0, 0.0
        self._native_seconds = 0.0
        """Seconds of this turn in native code: encoding, decoding, sampling, a draft model."""
        self._stats_at = 0.0
        self._computing: int | None = None
        """The request whose prompt fills most of the batch that is being computed."""

    # --- called by other threads --------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        self._inbox.put(lambda: self._add(sequence))

    def cancel(self, request_id: int) -> None:
        """Free the request's cells before the next step; a request that has ended is ignored."""
        self._inbox.put(lambda: self._cancel(request_id))
        if request_id == self._computing:
            self._runner.abort()

    def end_reasoning(self, request_id: int) -> None:
        """Close the request's reasoning at its next token; one that has ended is ignored."""
        self._inbox.put(lambda: self._end_reasoning(request_id))

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` on the engine thread between two steps."""
        self._inbox.put(action)

    # --- the engine thread -------------------------------------------------------------------

    def run(self) -> NoReturn:
        """Run turns until the process ends; sleep while there is no work."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Run the inbox, compute one step and send its events."""
        self._run_inbox()
        began, self._native_seconds = self._clock(), 0.0
        if self._n_deadlines:
            self._fail_expired(began)
        if self._scheduler.has_work:
            self.step()
        if self.traffic is not None:
            self.traffic.start_due()
        self._flush()
        self._overhead_seconds += self._clock() - began - self._native_seconds

    def step(self) -> None:
        """Plan and compute one batch, and handle its results."""
        step = self._scheduler.plan()
        if step.moves:  # a move that fails makes its sequence start over
            self.carrier.carry_out(step.moves)
            step.chunks = [c for c in step.chunks if c.start == c.sequence.n_computed]
        if step.started:
            self._announce(step.started)
        if step.span is not None and step.chunks:
            step.chunks = self._encode(step.chunks, step.span)
        if self.speculation is not None and step.chunks and not step.has_prompts:
            step.drafts = self._guess(self.speculation, step.chunks)
        step.chunks = self._decode(step.chunks, step.drafts)
        drawn = self._sample(step.chunks, step.drafts)
        if self.speculation is not None and len(step.chunks) == 1:
            self._native_seconds += self.speculation.read(step.chunks[0])
        if step.has_prompts:
            self._events += prompt_events(self._runner, step.chunks, self._clock())
        self._scheduler.advance(step)
        if not self._cuts_anywhere:
            self.carrier.after_batch([sequence for sequence, _, _ in step.chunks])
        self._accept(drawn)
        self._steps += 1

    def count_step(self, decode_seconds: float) -> None:
        """Count a batch that was computed between two steps."""
        self._steps += 1
        self._decode_seconds += decode_seconds

    def _run_inbox(self) -> None:
        """Run the actions from other threads; wait for one if there is no work."""
        first: Callable[[], None] | None = None
        if not self._scheduler.has_work:
            self.carrier.save_while(self._inbox.empty)
            try:
                first = self._inbox.get(timeout=_WAKE_SECONDS if self._scheduler.waiting else None)
            except queue.Empty:
                return
        if self._before_step is not None:
            self._before_step(self._clock())
        if first is not None:  # with a pooling model, it may compute a batch
            first()
        while not self._inbox.empty():  # this thread is the only reader
            self._inbox.get()()

    def _encode(self, chunks: list[Chunk], span: Span) -> list[Chunk]:
        """Compute the embeddings of a part of a medium. Returns the chunks, or none if it fails."""
        ((sequence, _, _),) = chunks
        self._in_hand[LOOP] = sequence.request_id
        began = self._clock()
        try:
            self._n_encoded += self._runner.encode(span, sequence.request.cache_salt)
        except WorkerError as error:
            self._fail(sequence, error)
            return []
        finally:
            seconds = self._clock() - began
            self._encode_seconds += seconds
            self._native_seconds += seconds
            self._pace.encoded(seconds)
        return chunks

    def _guess(self, speculation: Speculation, chunks: list[Chunk]) -> dict[Sequence, list[int]]:
        if chunks[0].sequence.is_on_trial:  # a guess may be what computes NaN
            return {}
        is_alone = len(chunks) == len(self._scheduler.running) == 1
        # In a split pool, sequences with different numbers of rows would take a pass each.
        if not is_alone and (speculation.for_one or not self._scheduler.limits.one_pass):
            return {}
        self._in_hand[LOOP] = chunks[0].sequence.request_id
        drafts = speculation.drafts(chunks)
        self._native_seconds += speculation.seconds
        return drafts

    # --- decode and its failures -------------------------------------------------------------

    def _decode(self, chunks: list[Chunk], drafts: dict[Sequence, list[int]]) -> list[Chunk]:
        """Compute as many of the chunks as possible and return them. Clears `drafts` if they were
        not computed."""
        while chunks:
            self._runner.fill(chunks, drafts)
            sizes = [n for _, _, n in chunks]
            n_rows = sum(sizes)
            # A batch that is mostly one prompt is aborted when that request is cancelled.
            self._computing = main_prompt(chunks) if n_rows > len(sizes) else None
            self._in_hand[LOOP] = self._computing or 0
            began = self._clock()
            outcome = self._runner.decode()
            seconds = self._clock() - began
            self._decode_seconds += seconds
            self._native_seconds += seconds
            cache = self._scheduler.cache
            if cache.read or cache.written:  # copies come first, even if the rows then fail
                cache.settled()
            self._computing = None
            if outcome == "ok":
                n_prompt = 0
                if n_rows > len(sizes):
                    n_prompt = sum([n for s, start, n in chunks if start < s.n_prompt])
                if n_prompt or n_rows == len(sizes):  # forced tokens would distort the measurement
                    n_rows += sum(map(len, drafts.values()))
                    self._pace.measured(n_rows - n_prompt, n_prompt, seconds)
                self._batch_seconds = seconds
                if drafts:
                    self._n_held = {
                        s: c.end + len(drafts[s]) for c in chunks if (s := c.sequence) in drafts
                    }
                return chunks
            if outcome != "no_room":  # which leaves the cells unchanged
                self._roll_back(chunks)
            if drafts:
                drafts.clear()
                chunks = [c for c in chunks if c.start == c.sequence.n_computed]
            elif outcome == "no_room":
                chunks = self._make_room(chunks)
            else:
                if outcome == "failed":
                    self._fail_youngest(chunks)
                break
        return []

    def _make_room(self, chunks: list[Chunk]) -> list[Chunk]:
        """Free cached cells; if there are none, shrink the batch; if it cannot shrink, preempt."""
        scheduler, cache = self._scheduler, self._scheduler.cache
        if not cache.room():
            smaller = shrink(chunks)
            if smaller is not None:
                return smaller
            if scheduler.preempt_youngest() is None:
                self._fail_youngest(chunks)
        self.carrier.carry_out(cache.take_moves())
        return [c for c in chunks if c.sequence.slot is not None]

    def _roll_back(self, chunks: list[Chunk]) -> None:
        """Remove the rows of an unfinished batch from the cells; they are computed again later."""
        self.carrier.carry_out(
            Truncate(c.sequence.slot, c.start) for c in chunks if c.sequence.slot is not None
        )

    def _fail_youngest(self, chunks: list[Chunk]) -> None:
        """Fail the youngest request of a batch that the device cannot compute; keep the others."""
        youngest = max((c.sequence for c in chunks), key=self._scheduler.running.index)
        self._fail(youngest, VramOom("the device has no memory left for this request"))

    def _sample(self, chunks: list[Chunk], drafts: dict[Sequence, list[int]]) -> list[Drawn]:
        """Draw a token for each chunk that ends its sequence, and one more for each correct guess,
        followed by the tokens that the sampler forces, which need no row.

        All tokens are drawn before any is handled, so that native code and Python alternate only
        once in a step.
        """
        began = self._clock()
        drawn = []
        n_correct: dict[int, int] = {}
        for index, chunk in enumerate(chunks):
            sequence, start, n_tokens = chunk
            if start + n_tokens == len(sequence.tokens):
                self._in_hand[LOOP] = sequence.request_id
                try:
                    sampler = sequence.sampler
                    tokens = [self._runner.sample(sampler, index)]
                    if draft := drafts.get(sequence):
                        tokens += self._verify(sequence, index, draft, tokens[0])
                    n_right = len(tokens) - 1
                    if sampler.may_give and sequence.request.sampling.logprobs is None:
                        # A token whose log-probabilities are wanted needs a row before it.
                        n_more = sequence.n_most - len(sequence.tokens) - len(tokens)
                        tokens += sampler.take_given(n_more)
                    if draft:  # speculation learns nothing from a request that has failed
                        n_correct[sequence.request_id] = n_right
                    drawn += [(sequence, index, token) for token in tokens]
                except NotANumber as error:
                    is_its_own = self._scheduler.nan_is_its_own(sequence)
                    self._scheduler.put_on_trial(sequence)
                    if is_its_own:
                        self._fail(sequence, error)
                    elif sequence in drafts:
                        n_correct[sequence.request_id] = 0
                except WorkerError as error:
                    self._fail(sequence, error)
                except Exception as error:
                    log.error("engine.sampler_failed", exc_info=error)
                    why = f"the sampler failed: {type(error).__name__}: {error}"
                    self._fail(sequence, InferenceFailed(why))
        if n_correct and self.speculation is not None:
            self.speculation.verified(n_correct, self._batch_seconds)
        seconds = self._clock() - began
        self._sample_seconds += seconds
        self._native_seconds += seconds
        return drawn

    def _verify(self, sequence: Sequence, index: int, draft: list[int], token: int) -> list[int]:
        """Draw a further token for each correct guess after chunk number `index`, and count the
        cells of those guesses as the sequence's."""
        drawn: list[int] = []
        while len(drawn) < len(draft) and token == draft[len(drawn)]:
            try:
                token = self._runner.sample(sequence.sampler, index, len(drawn) + 1)
            except WorkerError:
                break  # the next step, if there is one, computes this row again without guesses
            drawn.append(token)
        sequence.n_computed += len(drawn)
        return drawn

    # --- one sequence --------------------------------------------------------------------------

    def _accept(self, drawn: list[Drawn]) -> None:
        now, events, answers = self._clock(), self._events, self._answers
        for sequence, index, token in answers.take_plain(drawn, events):
            self._in_hand[LOOP] = sequence.request_id
            if sequence.first_token_at is None:
                sequence.first_token_at = now
            end = answers.take(sequence, index, token, events)
            if end is not None:
                answers.finish(sequence, *end, now, events)
                self._take_back(sequence)
                self._release(sequence, keep_cells=True)
        for sequence in list(self._n_held):
            self._take_back(sequence)
        self._in_hand[LOOP] = 0

    def _take_back(self, sequence: Sequence) -> None:
        """Free the cells of guesses that were wrong, or that follow the answer's end."""
        n_held = self._n_held.pop(sequence, 0)
        sequence.n_computed = min(sequence.n_computed, len(sequence.tokens))
        if sequence.slot is not None and n_held > sequence.n_computed:
            taken_back = Truncate(sequence.slot, sequence.n_computed, is_recent=True)
            self.carrier.carry_out([taken_back])

    def _fail(self, sequence: Sequence, error: WorkerError) -> None:
        self._events.append(Failed(sequence.request_id, error))
        self._release(sequence, keep_cells=False)

    def _release(self, sequence: Sequence, *, keep_cells: bool) -> None:
        del self._sequences[sequence.request_id]
        if self.speculation is not None:
            self.speculation.forget(sequence)
        self._n_deadlines -= sequence.request.deadline is not None
        self._scheduler.remove(sequence, keep_cells=keep_cells)
        self.carrier.carry_out(self._scheduler.cache.take_moves())

    # --- actions from other threads ----------------------------------------------------------

    def _add(self, sequence: Sequence) -> None:
        self._in_hand[LOOP] = sequence.request_id
        sequence.follow_produced(self._runner.piece)
        self._in_hand[LOOP] = 0
        self._sequences[sequence.request_id] = sequence
        context_end = self._runner.context_length + 1
        sequence.n_most = min(sequence.n_prompt + sequence.request.max_tokens, context_end)
        self._n_deadlines += sequence.request.deadline is not None
        if self.traffic is not None:
            self.traffic.look_up(sequence)
        self._scheduler.add(sequence)

    def _cancel(self, request_id: int) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._fail(sequence, Cancelled("the request was cancelled"))

    def _end_reasoning(self, request_id: int) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.sampler.end_reasoning(sequence.tokens[sequence.n_prompt :])

    def _fail_expired(self, now: float) -> None:
        for sequence in list(self._sequences.values()):
            deadline = sequence.request.deadline
            if deadline is not None and now >= deadline:
                self._fail(sequence, InferenceTimeout("the request's deadline has passed"))

    def _announce(self, started: list[Sequence]) -> None:
        for sequence in started:
            if sequence.started_at is None:
                now = sequence.started_at = self._clock()
                n_cached, prompt_end = sequence.n_computed, sequence.prompt_end
                event = Started(sequence.request_id, n_cached, prompt_end, sequence.tier, now)
                self._events.append(event)
        # Not with the step's results: a long prompt takes a second to compute.
        events, self._events = self._events, []
        if events:
            self._send(events)

    def _flush(self) -> None:
        events, self._events, now = self._events, [], self._clock()
        if now - self._stats_at >= _STATS_SECONDS or not self._scheduler.has_work:
            self._stats_at = now
            events.append(self.stats())
        if events:
            self._send(events)

    def stats(self) -> Stats:
        scheduler = self._scheduler
        cache, guesses = scheduler.cache, self.speculation
        n_cached = cache.cells_cached
        return Stats(
            kv_cells_used=cache.cells_running + n_cached,
            kv_cells_total=scheduler.limits.n_cells,
            kv_cells_cached=n_cached,
            steps=self._steps,
            decode_seconds=self._decode_seconds,
            overhead_seconds=self._overhead_seconds,
            sample_seconds=self._sample_seconds,
            tokens_drafted=guesses.n_drafted if guesses is not None else 0,
            tokens_accepted=guesses.n_accepted if guesses is not None else 0,
            media_encoded=self._n_encoded,
            encode_seconds=self._encode_seconds,
            preempted=tuple([s.request_id for s in scheduler.waiting if s.started_at is not None]),
        )
