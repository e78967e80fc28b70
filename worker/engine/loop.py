"""The engine's loop: plan, decode, sample, detokenise, send. The engine thread's only code.

Other threads hand in work through `submit`, `cancel` and `call`; nothing else is shared.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Any, Protocol

from worker.engine.scheduler import Chunk, Copy, Plan, Scheduler, Truncate
from worker.engine.sequence import Sequence
from worker.errors import Cancelled, InferenceTimeout, VramOom, WorkerError
from worker.messages import (
    DecodeOutcome,
    Event,
    Failed,
    Finished,
    Started,
    Stats,
    StopReason,
    Token,
    TokenLogprob,
)


class Backend(Protocol):
    """What the loop needs of a model; llama.cpp in the worker, a byte model in some tests."""

    context_length: int

    def fill(self, chunks: Rows[Chunk]) -> None:
        """Make the chunks' tokens the batch that `decode` computes."""

    def decode(self) -> DecodeOutcome:
        """Compute the batch."""

    def sample(self, sampler: Any, chunk: int) -> int:
        """The next token after the `chunk`th that was filled in."""

    def logprobs(self, chunk: int, token: int, n_top: int) -> TokenLogprob:
        """The log-probability of `token` there, and of the `n_top` best."""

    def is_eog(self, token: int) -> bool: ...

    def piece(self, token: int) -> bytes: ...

    def truncate(self, slot: int, length: int) -> object: ...

    def copy(self, source: int, target: int, length: int) -> None: ...

    def abort(self) -> None:
        """Make a running `decode` return early; from any thread."""

    def resume(self) -> None:
        """Take `abort` back."""


class Loop:
    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        send: Callable[[list[Event]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend, self._scheduler = backend, scheduler
        self._send, self._clock = send, clock
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sequences: dict[int, Sequence] = {}
        self._events: list[Event] = []
        self._deadlines = 0
        self._steps = 0
        self._decode_seconds = self._sample_seconds = self._overhead_seconds = 0.0
        self._computing: int | None = None
        """The request whose prompt is most of the batch that is being computed."""

    # --- from other threads ----------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        self._inbox.put(lambda: self._add(sequence))

    def cancel(self, request_id: int) -> None:
        """Free the request's cells before the next step; ended requests are ignored."""
        self._inbox.put(lambda: self._cancel(request_id))
        if request_id == self._computing:
            self._backend.abort()

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` on the engine thread, between two steps."""
        self._inbox.put(action)

    def stop(self) -> None:
        self._inbox.put(None)

    # --- the engine thread -------------------------------------------------------------------

    def run(self) -> None:
        """Work until `stop`; sleeps while there is nothing to do."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """Take in what came, compute one step, send what happened; false when asked to stop."""
        if not self._take_in():
            return False
        began, native_before = self._clock(), self._decode_seconds + self._sample_seconds
        self._expire()
        if self._scheduler.has_work:
            self.step()
        self._flush()
        native = self._decode_seconds + self._sample_seconds - native_before
        self._overhead_seconds += self._clock() - began - native
        return True

    def step(self) -> None:
        """Compute one batch and send what came out of it."""
        plan = self._scheduler.plan()
        self._announce(plan)
        self._apply(plan)
        plan = self._decode(plan)
        drawn = self._sample(plan)
        self._scheduler.advance(plan)
        now = self._clock()
        for sequence, index, token in drawn:
            self._accept(sequence, index, token, now)
        self._steps += 1

    def _take_in(self) -> bool:
        """Run what other threads handed in; false when asked to stop."""
        wait = not self._scheduler.has_work
        while True:
            try:
                action = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if action is None:
                return False
            action()
            wait = False

    def _apply(self, plan: Plan) -> None:
        for move in plan.moves:
            match move:
                case Truncate(slot, length):
                    self._backend.truncate(slot, length)
                case Copy(source, target, length):
                    self._backend.copy(source, target, length)

    # --- decode and what may go wrong ----------------------------------------------------------

    def _decode(self, plan: Plan) -> Plan:
        """Compute the plan, or as much of it as can be; returns what was computed."""
        while plan.chunks:
            self._backend.fill(plan.chunks)
            # A batch that is mostly one prompt is abandoned when that request is cancelled.
            self._computing = plan.main_prompt
            began = self._clock()
            outcome = self._backend.decode()
            self._decode_seconds += self._clock() - began
            self._computing = None
            self._backend.resume()
            match outcome:
                case "ok":
                    return plan
                case "aborted":
                    self._roll_back(plan)
                    return Plan()
                case "no_room":
                    plan = self._make_room(plan)
                case "failed":
                    self._roll_back(plan)
                    plan = self._drop_youngest(plan)
        return Plan()

    def _make_room(self, plan: Plan) -> Plan:
        """Free cached cells, then compute less, then send the youngest back to the queue."""
        if self._scheduler.drop_cached():
            self._apply(self._scheduler.take_freed())
            return plan
        smaller = self._scheduler.shrink(plan)
        if smaller is not None:
            return smaller
        if self._scheduler.preempt_youngest() is None:
            return self._drop_youngest(plan)
        self._apply(self._scheduler.take_freed())
        return Plan(chunks=[c for c in plan.chunks if c.sequence.slot is not None])

    def _roll_back(self, plan: Plan) -> None:
        """Take the rows of an unfinished batch out of the cache; they are computed again."""
        for chunk in plan.chunks:
            assert chunk.sequence.slot is not None
            self._backend.truncate(chunk.sequence.slot, chunk.start)

    def _drop_youngest(self, plan: Plan) -> Plan:
        """The device cannot compute this batch: the youngest request in it fails alone."""
        victim = max((c.sequence for c in plan.chunks), key=lambda s: s.admission)
        self._fail(victim, VramOom("the device has no memory left for this request"))
        self._apply(self._scheduler.take_freed())
        return Plan(chunks=[c for c in plan.chunks if c.sequence is not victim])

    def _sample(self, plan: Plan) -> list[tuple[Sequence, int, int]]:
        """Draw a token for each chunk that ends its sequence: (sequence, index of chunk, token).

        All are drawn before any is looked at: each draw passes over the vocabulary's logits,
        which would push the code that takes the tokens in out of the processor's caches.
        """
        began = self._clock()
        drawn = []
        for index, chunk in enumerate(plan.chunks):
            if chunk.wants_logits:
                try:
                    token = self._backend.sample(chunk.sequence.sampler, index)
                except WorkerError as error:
                    self._fail(chunk.sequence, error)
                else:
                    drawn.append((chunk.sequence, index, token))
        self._sample_seconds += self._clock() - began
        return drawn

    # --- one sequence --------------------------------------------------------------------------

    def _accept(self, sequence: Sequence, index: int, token: int, now: float) -> None:
        """Take a drawn token into its sequence, send its text, end the sequence where it ends."""
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        if self._backend.is_eog(token):
            self._finish(sequence, "EOS", now)
            return
        tokens, request = sequence.tokens, sequence.request
        tokens.append(token)
        n_top = request.sampling.logprobs
        if n_top is not None:
            sequence.pending_logprobs.append(self._backend.logprobs(index, token, n_top))
        sequence.pending_ids.append(token)
        text = sequence.detokenizer.feed(self._backend.piece(token))
        text, stop = sequence.stops.feed(text)
        self._emit_text(sequence, text)
        if stop is not None:
            self._finish(sequence, "STOP_SEQUENCE", now, stop)
        elif sequence.n_out >= request.max_tokens or len(tokens) > self._backend.context_length:
            self._finish(sequence, "MAX_TOKENS", now)

    def _emit_text(self, sequence: Sequence, text: str) -> None:
        if not text:
            return
        self._events.append(
            Token(
                sequence.request_id,
                text,
                tuple(sequence.pending_ids),
                tuple(sequence.pending_logprobs),
            )
        )
        sequence.pending_ids.clear()
        sequence.pending_logprobs.clear()

    def _finish(
        self, sequence: Sequence, reason: StopReason, now: float, stop: str | None = None
    ) -> None:
        if stop is None:
            # Text that was held for a stop that did not come, or half a character; the latter
            # may complete a stop once it has become U+FFFD.
            text, stop = sequence.stops.feed(sequence.detokenizer.finish())
            if stop is None:
                text += sequence.stops.finish()
            else:
                reason = "STOP_SEQUENCE"
            self._emit_text(sequence, text)
        began = sequence.first_token_at or now
        self._events.append(
            Finished(
                sequence.request_id,
                reason,
                sequence.n_out,
                round(1000 * (now - began), 3),
                stop,
            )
        )
        self._release(sequence, keep_cells=True)

    def _fail(self, sequence: Sequence, error: WorkerError) -> None:
        self._events.append(Failed(sequence.request_id, error))
        self._release(sequence, keep_cells=False)

    def _release(self, sequence: Sequence, *, keep_cells: bool) -> None:
        del self._sequences[sequence.request_id]
        self._deadlines -= sequence.request.deadline is not None
        self._scheduler.remove(sequence, keep_cells=keep_cells)
        sequence.sampler.close()

    # --- on the engine thread, for other threads -------------------------------------------------

    def _add(self, sequence: Sequence) -> None:
        self._sequences[sequence.request_id] = sequence
        self._deadlines += sequence.request.deadline is not None
        self._scheduler.add(sequence)

    def _cancel(self, request_id: int) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._fail(sequence, Cancelled("the request was cancelled"))

    def _expire(self) -> None:
        if not self._deadlines:
            return
        now = self._clock()
        for sequence in list(self._sequences.values()):
            deadline = sequence.request.deadline
            if deadline is not None and now >= deadline:
                self._fail(sequence, InferenceTimeout("the request's deadline has passed"))

    def fail_all(self, error: WorkerError) -> None:
        """End every request; for a loop that cannot go on."""
        for sequence in list(self._sequences.values()):
            self._fail(sequence, error)
        self._flush()

    def _announce(self, plan: Plan) -> None:
        for sequence, n_cached in plan.started:
            if not sequence.is_announced:
                sequence.is_announced = True
                self._events.append(Started(sequence.request_id, n_cached))

    def _flush(self) -> None:
        self._events.append(self.stats())
        self._send(self._events)
        self._events = []

    def stats(self) -> Stats:
        scheduler = self._scheduler
        n_cached = scheduler.cells_cached
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_prompt_tokens=scheduler.waiting_prompt_tokens,
            kv_cells_used=scheduler.cells_running + n_cached,
            kv_cells_total=scheduler.limits.n_cells,
            kv_cells_cached=n_cached,
            steps=self._steps,
            decode_seconds=self._decode_seconds,
            overhead_seconds=self._overhead_seconds,
            sample_seconds=self._sample_seconds,
        )
