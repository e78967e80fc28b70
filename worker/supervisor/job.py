"""One job on the API side, from its submission to its one terminal event.

The supervisor feeds it the engine's events, and one task reads them from its inbox. A job measures
its own times and is counted in the metrics exactly once.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from msgspec.structs import replace

from worker.errors import Cancelled, EngineCrashed, WorkerError
from worker.observability.logs import get_logger
from worker.observability.metrics import Metrics, Outcome
from worker.supervisor.status import Activity, Doing
from worker.wire.messages import (
    Accepted,
    Answered,
    End,
    Failed,
    Finished,
    PromptProgress,
    PromptScored,
    Started,
    Token,
    TokenLogprob,
)
from worker.wire.work import InferenceRequest, ProveResidency, Work

StreamEvent = Started | PromptProgress | PromptScored | Token | End

_log = get_logger()
_DIFFERENT = "The engine died, and the next one computed a different answer."
_OUTCOMES: dict[str, Outcome] = {"CANCELLED": "cancelled", "INFERENCE_TIMEOUT": "timeout"}


class Stage(IntEnum):
    """How far the current engine has come with a job."""

    HELD = 0
    """No engine has the job: the one that had it died, or none was ready when it came."""
    SENT = 1
    ACCEPTED = 2
    STARTED = 3
    PRODUCING = 4


@dataclass(slots=True, eq=False)
class Inbox(AsyncIterator[list[StreamEvent]]):
    """The events of one request's jobs, for the one task that reads them.

    Iterating yields lists of events, one per engine frame, until each job has had its terminal
    event. Frames that arrive while the reader is busy are joined. An empty list means that nothing
    has come for `silence_seconds`.
    """

    silence_seconds: float = 0.0
    """0 turns empty lists off."""
    n_running: int = 0
    """Jobs that have not ended."""
    timer: asyncio.TimerHandle | None = None
    """The next check for silence; `None` if none is scheduled."""
    events: list[StreamEvent] = field(default_factory=list)
    """Those that have not been read yet."""
    _waiter: asyncio.Future[None] | None = None
    """Resolved by `put`. An `asyncio.Event` would cost more, for each token of each stream."""
    _read_at: float = 0.0
    """When the reader last began to wait."""
    _is_silent: bool = False

    def put(self, events: Sequence[StreamEvent] = ()) -> None:
        """Add events and wake the reader, even if there are none."""
        self.events += events
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def news(self) -> None:
        """Wait for the next call of `put`."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    async def begun(self) -> None:
        """Wait for the first token or the end of a generation, without consuming any event.

        Raises:
            WorkerError: a job failed before that.
        """
        while True:
            for event in self.events:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Token | Finished):
                    return
            await self.news()

    async def __anext__(self) -> list[StreamEvent]:
        while not self.events:
            if not self.n_running:
                raise StopAsyncIteration
            if self.silence_seconds and self.timer is None:
                self._check_silence()
            self._read_at = time.monotonic()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            if self._is_silent:
                break
        self._is_silent = False
        events, self.events = self.events, []
        return events

    def _check_silence(self) -> None:
        """Wake the reader if it has waited for a period. A timer costs nothing per event."""
        loop = asyncio.get_running_loop()
        self.timer = loop.call_later(self.silence_seconds, self._check_silence)
        if self._read_at and time.monotonic() - self._read_at >= 0.99 * self.silence_seconds:
            self._is_silent = True
            self.put()


@dataclass(slots=True, eq=False, repr=False)
class Job:
    request_id: int
    work: Work
    _metrics: Metrics
    _drop: Callable[[Job, WorkerError], None]
    """Ends the job with an error and makes the engine forget it."""
    inbox: Inbox = field(default_factory=Inbox)
    """Where its events go."""
    counts_prompt: bool = True
    """Whether `usage` and metrics count its prompt; of several choices, only the first does."""
    job_id: str | None = field(init=False)
    """The client's name for the job; only generating requests have one."""
    is_internal: bool = field(init=False)
    """Whether the worker itself opened the job and no client waits for it."""
    is_accepted: bool = False
    has_ended: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    """Tokens of the prompt that are in the cells, including reused ones."""
    started_at_unix: float | None = None
    """When it first got a slot; `None` before that."""
    engine_restarts: int = 0
    """Engines that died after they had started the job."""
    crashes_spent: int = 0
    """Crashes that count against `--survive-crashes`."""
    ends_reasoning: bool = False
    """Whether a client has asked to close its reasoning."""
    is_suspect: bool = False
    """Whether the last crash of an engine that had the job was blamed on it."""
    deadline: asyncio.TimerHandle | None = None
    is_preempted: bool = False
    """Whether the engine has given its slot to others for now."""
    stage: Stage = Stage.SENT
    clock: Callable[[], float] = time.monotonic
    """The clock of `stage_since`, by which the engine is judged to be stalled."""
    stage_since: float = field(init=False)
    held_seconds: float = 0.0
    """How long it has been `HELD`, in total."""
    _submitted_at: float = field(default_factory=time.monotonic)
    _context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Carries the correlation id to the log."""
    _started_at: float = 0.0
    _first_token_at: float | None = None
    _last_token_at: float = 0.0
    _prompt_ids: bytes = b""
    _scores: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt, as far as this engine has sent them."""
    _is_scored: bool = False
    """Whether the prompt's log-probabilities were passed on."""
    _sent_ids: list[int] = field(default_factory=list)
    """Ids of the answer's tokens that were passed on."""
    _sent_chars: int = 0
    """Length of the answer's text that was passed on."""
    _n_unsent: int = 0
    """Number of tokens at the answer's end without text, such as those of a stop string."""
    _learned: tuple[float, ...] = ()
    """The state of a sampler that learns, after `_sent_ids`."""
    _to_replay: list[int] = field(default_factory=list)
    """Ids that this engine has yet to repeat, as they were passed on before a crash."""
    _error: WorkerError | None = None
    """The error that it ended with."""

    def __post_init__(self) -> None:
        self.job_id = self.work.job_id if isinstance(self.work, InferenceRequest) else None
        self.is_internal = isinstance(self.work, ProveResidency)
        self.inbox.n_running += 1
        self.stage_since = self.clock()

    @property
    def seed(self) -> int:
        assert isinstance(self.work, InferenceRequest)
        return self.work.sampling.seed

    @property
    def tokens_out(self) -> int:
        """The count in `usage`; tokens whose text is withheld count once it comes or at the end."""
        return len(self._sent_ids) + self._n_unsent

    @property
    def has_started(self) -> bool:
        """Whether the current engine has given it a slot, even if it has lost that since."""
        return self.stage >= Stage.STARTED

    @property
    def is_repeating(self) -> bool:
        """Whether the engine has yet to repeat what an earlier one sent."""
        return bool(self._to_replay)

    @property
    def has_slot(self) -> bool:
        return self.has_started and not self.is_preempted

    @property
    def activity(self) -> Activity:
        """What the engine is doing for it; counts and times, nothing of its text."""
        doing: Doing = "decoding"
        cached, computed = self.cached_tokens, self.prompt_tokens
        if not self.has_slot:  # it has no cells
            doing, cached, computed = "waiting", 0, 0
        elif self.stage == Stage.STARTED:
            doing, computed = "prompt", self.computed_tokens
        return Activity(
            doing=doing,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=cached,
            computed_tokens=computed,
            tokens_out=self.tokens_out,
            seconds=round(self.age_seconds, 3),
        )

    @property
    def age_seconds(self) -> float:
        """Seconds since it was submitted."""
        return time.monotonic() - self._submitted_at

    @property
    def decode_time_ms(self) -> float:
        """Time from the first token to the latest; `Finished` has the engine's measurement."""
        if self._first_token_at is None:
            return 0.0
        return (self._last_token_at - self._first_token_at) * 1000

    # --- the reader's side ---

    async def accepted(self) -> None:
        """Wait until the engine has accepted the job; raises its refusal."""
        while not self.is_accepted and not self.has_ended:
            await self.inbox.news()
        if not self.is_accepted and self._error is not None:
            raise self._error

    async def answer(self) -> Any:
        """Wait for the value of `Answered`; raises the error that ended the job."""
        async for events in self.inbox:
            match events[-1]:
                case Answered(value=value):
                    return value
                case Failed(error=error):
                    raise error
        raise AssertionError("only a request that generates no text has an answer")

    def cancel(self) -> None:
        """End the job with `Cancelled`, unless it has ended already."""
        self._drop(self, Cancelled("The client abandoned the request."))

    # --- the supervisor's side ---

    def enter(self, stage: Stage) -> None:
        now = self.clock()
        if self.stage == Stage.HELD:
            self.held_seconds += now - self.stage_since
        self.stage, self.stage_since = stage, now

    def accept(self, event: Accepted) -> None:
        """Record that an engine accepted the job; after a crash, the next engine does so again."""
        self.enter(Stage.ACCEPTED)
        self.prompt_tokens = event.prompt_tokens
        self._prompt_ids = event.prompt_ids
        if not self.is_accepted:
            self.is_accepted = True
            if self.counts_prompt:
                self._metrics.tokens_in.inc(event.prompt_tokens)
            self.inbox.put()

    def submission(self) -> Work:
        """The work to send to the engine; after a crash, the rest of it.

        A deterministic answer is recomputed from the prompt, to be bit-identical to that of a
        single run, unless a client ended its reasoning: nothing records at which token. Other
        answers continue after the tokens that were passed on.
        """
        self._scores = []
        work = self.work
        if not isinstance(work, InferenceRequest) or not self.is_accepted:
            return work
        reasoning = work.sampling.reasoning
        if self.ends_reasoning and reasoning is not None:
            sampling = replace(work.sampling, reasoning=replace(reasoning, budget=0))
            work = replace(work, sampling=sampling)
        is_replayed = work.deterministic and not self.ends_reasoning
        self._to_replay = list(self._sent_ids) if is_replayed else []
        produced = () if is_replayed else tuple(self._sent_ids)
        # A prompt with media has no ids and is read again: not all of it is tokens.
        prompt = tuple(array("i", self._prompt_ids)) if self._prompt_ids else work.prompt
        learned = () if is_replayed else self._learned
        lines = work.lines
        if lines.after_ms:
            lines = replace(lines, began=self._first_token_at)
        return replace(
            work,
            prompt=prompt,
            produced=produced,
            sent_chars=self._sent_chars,
            learned=learned,
            lines=lines,
        )

    def gather(self, part: PromptScored) -> PromptScored | None:
        """Collect a part; returns all log-probabilities of the prompt once the last has come."""
        self._scores += part.logprobs
        if part.n_left:
            return None
        whole, self._scores = PromptScored(part.request_id, tuple(self._scores)), []
        return whole

    def continued(self, events: list[StreamEvent]) -> list[StreamEvent]:
        """The events of a frame without those that were passed on before a crash.

        Raises:
            EngineCrashed: a deterministic answer differs from what was passed on before.
        """
        news: list[StreamEvent] = []
        for event in events:
            match event:
                case Started() if self.started_at_unix is not None:
                    self.enter(Stage.STARTED)
                case PromptProgress(n_computed=n) if self._sent_ids or n <= self.computed_tokens:
                    pass  # a client sees progress that only grows, and none after the first token
                case PromptScored() if self._is_scored:
                    pass
                case Token(token_ids=ids) if self._to_replay:
                    self.stage = Stage.PRODUCING
                    if tuple(self._to_replay[: len(ids)]) != ids:
                        raise EngineCrashed(_DIFFERENT)
                    del self._to_replay[: len(ids)]
                case Finished():
                    if self._to_replay:
                        raise EngineCrashed(_DIFFERENT)
                    if self._first_token_at is not None:  # else this engine computed all of it
                        prompt_s = self._first_token_at - self._started_at
                        decode_s = time.monotonic() - self._first_token_at
                        times = [round(1000 * seconds, 3) for seconds in (prompt_s, decode_s)]
                        event = replace(event, prompt_time_ms=times[0], decode_time_ms=times[1])
                    news.append(event)
                case _:
                    news.append(event)
        return news

    def feed(self, events: list[StreamEvent]) -> None:
        """Pass the events of one frame on to the reader."""
        assert not self.has_ended, "an event after the terminal one"
        n_tokens = 0
        for event in events:
            match event:
                case Token():
                    n_tokens += len(event.token_ids)
                    self._sent_ids += event.token_ids
                    self._sent_chars += len(event.text)
                    self._learned = event.learned
                case Started():
                    self.enter(Stage.STARTED)
                    self.started_at_unix = time.time()
                    self._started_at = event.at or time.monotonic()
                    self.cached_tokens = self.computed_tokens = event.cached_tokens
                    self._metrics.queue_wait.observe(self._started_at - self._submitted_at)
                    if self.counts_prompt:
                        self._metrics.looked_up(self.prompt_tokens, event.cached_tokens, event.tier)
                case PromptProgress():
                    self.computed_tokens = event.n_computed
                case PromptScored():
                    self._is_scored = True
                case Finished(tokens_out=n_out):
                    self._n_unsent = max(n_out - len(self._sent_ids), 0)
                    n_tokens += self._n_unsent
        if n_tokens:
            self.stage = Stage.PRODUCING
            now = time.monotonic()
            seconds_each = (now - self._last_token_at) / n_tokens if self._first_token_at else None
            self._metrics.tokens(n_tokens, seconds_each)
            if self._first_token_at is None:
                self._first_token_at = now
                self._metrics.first_token.observe(now - self._submitted_at)
            self._last_token_at = now
        match events[-1]:
            case Finished(stop_reason=reason):
                self._end("success", reason)
            case Answered():
                self._end("success", None)
            case Failed(error=error):
                self._error = error
                self._end(_OUTCOMES.get(error.code, "error"), error.code)
        self.inbox.put(events)

    def _end(self, outcome: Outcome, reason: str | None) -> None:
        self.has_ended = True
        inbox = self.inbox
        inbox.n_running -= 1
        if not inbox.n_running and inbox.timer is not None:
            inbox.timer.cancel()
            inbox.timer = None
        # Refusals are counted where they are reported; tokenizing is not counted as inference.
        if not self.is_accepted:
            return
        duration_ms = (time.monotonic() - self._submitted_at) * 1000
        self._metrics.requests.labels(outcome).inc()
        self._metrics.duration_ms.observe(duration_ms)
        self._context.run(self._log_end, outcome, reason, duration_ms)

    def _after_ms(self, moment: float | None) -> float | None:
        """Milliseconds from the submission to `moment`; `None` if that has not come."""
        return round((moment - self._submitted_at) * 1000, 3) if moment else None

    def _log_end(self, outcome: Outcome, reason: str | None, duration_ms: float) -> None:
        _log.info(
            "request.ended",
            job_id=self.job_id,
            kind=type(self.work).__name__,
            outcome=outcome,
            reason=reason,
            tokens_out=self.tokens_out,
            cached_tokens=self.cached_tokens,
            queue_ms=self._after_ms(self._started_at),
            first_token_ms=self._after_ms(self._first_token_at),
            duration_ms=round(duration_ms, 3),
        )
