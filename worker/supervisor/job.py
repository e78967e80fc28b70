"""One job on the API side, from its submission to its one terminal event.

The supervisor feeds it with the engine's events, and one task reads them from its inbox. It keeps
the job's times and counts it in the metrics exactly once.
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
_OUTCOMES: dict[str, Outcome] = {"CANCELLED": "cancelled", "INFERENCE_TIMEOUT": "timeout"}


class Stage(IntEnum):
    """How far the current engine has come with a job."""

    HELD = 0
    """No engine has the job: the one that had it died."""
    SENT = 1
    ACCEPTED = 2
    STARTED = 3
    PRODUCING = 4


@dataclass(slots=True, eq=False)
class Inbox(AsyncIterator[list[StreamEvent]]):
    """The events of one request's jobs, for the one task that reads them.

    Iterating gives lists of events, one per engine frame, until each job has had its terminal
    event. Frames that arrive while the reader is busy are joined. An empty list says that nothing
    has come for `silence_seconds`.
    """

    silence_seconds: float = 0.0
    """0 is any time."""
    n_running: int = 0
    """Jobs that have not ended."""
    timer: asyncio.TimerHandle | None = None
    """Looks for the next silence while there are such."""
    events: list[StreamEvent] = field(default_factory=list)
    """Those that were not read yet."""
    _waiter: asyncio.Future[None] | None = None
    """Ends the wait for `put`. An `asyncio.Event` takes longer, for each token of each stream."""
    _read_at: float = 0.0
    """When the reader last began to wait."""
    _is_silent: bool = False

    def put(self, events: Sequence[StreamEvent] = ()) -> None:
        """Add events, and wake the reader also without any."""
        self.events += events
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def news(self) -> None:
        """Wait until the next call of `put`."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    async def begun(self) -> None:
        """Wait until a token or an end has come, and read nothing.

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
                self._look()
            self._read_at = time.monotonic()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            if self._is_silent:
                break
        self._is_silent = False
        events, self.events = self.events, []
        return events

    def _look(self) -> None:
        """Break a silence. It looks after each period, at no cost per event."""
        self.timer = asyncio.get_running_loop().call_later(self.silence_seconds, self._look)
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
    """Whether `usage` and metrics count its prompt: of several choices, the first counts it."""
    job_id: str | None = field(init=False)
    """The client's name for the job; only generating requests have one."""
    is_internal: bool = field(init=False)
    """Whether the worker itself asks and no client waits."""
    is_accepted: bool = False
    has_ended: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    """Tokens of the prompt that are in the cells, reused ones too."""
    started_at_unix: float | None = None
    """When it first got a slot; `None` while it waits."""
    engine_restarts: int = 0
    """Engines that died while it had a slot."""
    crashes_spent: int = 0
    """How many of those count against `--survive-crashes`."""
    ends_reasoning: bool = False
    """Whether its reasoning is to be closed, by a client's order."""
    is_suspect: bool = False
    """Whether the last crash was blamed on it."""
    deadline: asyncio.TimerHandle | None = None
    is_preempted: bool = False
    """Whether the engine has taken its slot for others, for now."""
    stage: Stage = Stage.SENT
    clock: Callable[[], float] = time.monotonic
    """That of `stage_since`, by which the engine is judged."""
    stage_since: float = field(init=False)
    held_seconds: float = 0.0
    """How long it has waited for an engine to be there."""
    _submitted_at: float = field(default_factory=time.monotonic)
    _context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """It has the correlation id, for the log."""
    _started_at: float = 0.0
    _first_token_at: float | None = None
    _last_token_at: float = 0.0
    _prompt_ids: bytes = b""
    _scores: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt, as far as they have come from this engine."""
    _is_scored: bool = False
    """Whether the prompt's log-probabilities were sent."""
    _sent_ids: list[int] = field(default_factory=list)
    _n_unsent: int = 0
    """Tokens at its end that have no text, as those of a stop."""
    _learned: tuple[float, ...] = ()
    """The state of its sampler after those."""
    _to_replay: list[int] = field(default_factory=list)
    _error: WorkerError | None = None
    """What it ended with."""

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
        """As `usage` tells it; what is still held back counts at the end."""
        return len(self._sent_ids) + self._n_unsent

    @property
    def has_started(self) -> bool:
        """Whether this engine has computed for it."""
        return self.stage >= Stage.STARTED

    @property
    def has_slot(self) -> bool:
        return self.has_started and not self.is_preempted

    @property
    def activity(self) -> Activity:
        """What is done with it, without anything of its text."""
        doing: Doing = "decoding"
        cached, computed = self.cached_tokens, self.prompt_tokens
        if not self.has_slot:  # what was in its cells is gone
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
        """Since it was submitted."""
        return time.monotonic() - self._submitted_at

    @property
    def decode_time_ms(self) -> float:
        """Time since the first token; the terminal event has the engine's own measurement."""
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
        """The value that the engine answers; raises the error that ended the job."""
        async for events in self.inbox:
            match events[-1]:
                case Answered(value=value):
                    return value
                case Failed(error=error):
                    raise error
        raise AssertionError("only a request that generates no text has an answer")

    def cancel(self) -> None:
        """End the job with `Cancelled`, unless it has ended already."""
        self._drop(self, Cancelled("The client gave the request up."))

    # --- the supervisor's side ---

    def enter(self, stage: Stage) -> None:
        now = self.clock()
        if self.stage == Stage.HELD:
            self.held_seconds += now - self.stage_since
        self.stage, self.stage_since = stage, now

    def accept(self, event: Accepted) -> None:
        """Record that an engine accepted the job; after a crash, the next one does so again."""
        self.enter(Stage.ACCEPTED)
        self.prompt_tokens = event.prompt_tokens
        self._prompt_ids = event.prompt_ids
        if not self.is_accepted:
            self.is_accepted = True
            if self.counts_prompt:
                self._metrics.tokens_in.inc(event.prompt_tokens)
            self.inbox.put()

    def submission(self) -> Work:
        """The work to send to the engine; after a crash, what is left of it.

        A deterministic answer is computed again from the prompt, so that its bits are those of a
        single run, unless its reasoning was ended on command: nothing tells at which token. Other
        answers continue after the tokens that were sent.
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
        # A prompt with media is read again: its ids are not all tokens.
        prompt = tuple(array("i", self._prompt_ids)) if self._prompt_ids else work.prompt
        learned = () if is_replayed else self._learned
        return replace(work, prompt=prompt, produced=produced, learned=learned)

    def gather(self, part: PromptScored) -> PromptScored | None:
        """All log-probabilities of the prompt, once their last part has come."""
        self._scores += part.logprobs
        if part.n_left:
            return None
        whole, self._scores = PromptScored(part.request_id, tuple(self._scores)), []
        return whole

    def continued(self, events: list[StreamEvent]) -> list[StreamEvent]:
        """The events of a frame that were not sent before a crash.

        Raises:
            EngineCrashed: a deterministic answer differs from what was sent before.
        """
        news: list[StreamEvent] = []
        for event in events:
            match event:
                case Started() if self.started_at_unix is not None:
                    self.enter(Stage.STARTED)
                case PromptProgress(n_computed=n) if self._sent_ids or n <= self.computed_tokens:
                    pass  # the prompt once more: its progress only grows, and ends with the answer
                case PromptScored() if self._is_scored:
                    pass
                case Token(token_ids=ids) if self._to_replay:
                    self.stage = Stage.PRODUCING
                    if tuple(self._to_replay[: len(ids)]) != ids:
                        raise EngineCrashed("The engine died, and the next computed otherwise.")
                    del self._to_replay[: len(ids)]
                case Finished():
                    if self._to_replay:
                        raise EngineCrashed("The engine died, and the next computed otherwise.")
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
        """Take the events of one frame, in order."""
        assert not self.has_ended, "an event after the terminal one"
        n_tokens = 0
        for event in events:
            match event:
                case Token():
                    n_tokens += len(event.token_ids)
                    self._sent_ids += event.token_ids
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
        # What is refused is counted where it is told. To cut texts into tokens is no inference; a
        # request may need it before its own work.
        if not self.is_accepted:
            return
        duration_ms = (time.monotonic() - self._submitted_at) * 1000
        self._metrics.requests.labels(outcome).inc()
        self._metrics.duration_ms.observe(duration_ms)
        self._context.run(self._log_end, outcome, reason, duration_ms)

    def _after_ms(self, moment: float | None) -> float | None:
        """Since its submission; `None` if it never came to that."""
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
