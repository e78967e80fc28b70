"""The engine as the rest of the API process knows it: requests in, streams of events out.

Owns the admission of requests, the way of each frame's events to their streams, and what the
loss of an engine means for them; `keeper` owns the process, `jobs` the table. Everything here runs
on the API process's event loop and never waits for the engine, except `submit` (until it accepts)
and `call` (until it replies).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

from worker.engine.calls import Calls
from worker.engine.child import ENGINE_ARGV
from worker.engine.generation import Generation, StreamEvent
from worker.engine.jobs import Job, Jobs
from worker.engine.keeper import Callbacks, EngineKeeper
from worker.engine.recovery import Quarantine
from worker.errors import (
    InferenceTimeout,
    InvalidRequest,
    NotReady,
    QueueFull,
    ResidencyViolation,
    ShuttingDown,
    WorkerError,
)
from worker.messages import (
    Accepted,
    Cancel,
    Command,
    EngineConfig,
    EngineInfo,
    Event,
    Failed,
    Finished,
    InferenceRequest,
    Progress,
    ProveResidency,
    Ready,
    Rejected,
    Reply,
    Started,
    StartFailed,
    Stats,
    Submit,
    Token,
)
from worker.observability.logs import get_logger
from worker.observability.metrics import Metrics
from worker.settings import Settings

State = Literal["loading", "ready", "recovering", "draining", "failed"]

RESIDENCY_INTERVAL_SECONDS = 15.0
DEADLINE_GRACE_SECONDS = 0.25
"""The engine enforces deadlines itself, to one step; this long after, the supervisor does."""
RESUBMITS = 2
"""How many engines a waiting request may outlive, lest one that kills them ends the worker."""


class Supervisor:
    def __init__(
        self, settings: Settings, metrics: Metrics, argv: Sequence[str] = ENGINE_ARGV
    ) -> None:
        self.progress = Progress("starting", 0.0)
        self.stats: Stats | None = None
        self.residency_lost: str | None = None
        self._settings = settings
        self._metrics = metrics
        self._log = get_logger()
        self._draining = False
        self._drained = asyncio.Event()
        self._progress_changed = asyncio.Event()
        callbacks = Callbacks(
            on_frame=self._on_frame,
            on_ready=self._on_ready,
            on_lost=self._on_lost,
            on_given_up=self._on_given_up,
            on_progress=self.report,
            is_stalled=lambda seconds: self.last_progress_ms >= seconds * 1e3,
            is_draining=lambda: self._draining,
        )
        self._keeper = EngineKeeper(settings, metrics, callbacks, argv)
        self._jobs = Jobs(self._tell_engine_to_drop, self._job_left)
        self._cancelled_at: dict[int, float] = {}
        self._calls = Calls()
        self._quarantine = Quarantine()
        self._progress_at = 0.0

    # --- what others read ----------------------------------------------------------------

    @property
    def state(self) -> State:
        condition = self._keeper.condition
        return "draining" if self._draining and condition != "failed" else condition

    @property
    def info(self) -> EngineInfo | None:
        """Of the engine that serves now, or of the last one that did."""
        return self._keeper.info

    @property
    def fatal(self) -> asyncio.Future[WorkerError]:
        """Set once, when the worker can serve no longer and has to leave with that error."""
        return self._keeper.fatal

    @property
    def running(self) -> int:
        return self._jobs.running

    @property
    def queued(self) -> int:
        """Submitted or accepted, without a slot yet."""
        return self._jobs.queued

    @property
    def queued_prompt_tokens(self) -> int:
        return self._jobs.queued_prompt_tokens

    @property
    def last_progress_ms(self) -> float:
        """Since the engine's last step while it has work; 0 when idle."""
        if not self._jobs and not self._calls:
            return 0.0
        return (time.monotonic() - max(self._progress_at, self._keeper.resumed_at)) * 1e3

    @property
    def stalled(self) -> bool:
        """There is work and has been no progress for the stall timeout."""
        if self._keeper.condition != "ready":
            return False
        return self.last_progress_ms >= self._settings.stall_timeout * 1e3

    @property
    def engine_pid(self) -> int | None:
        return self._keeper.pid

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change of `state` or `progress`, once; then there is another."""
        return self._progress_changed

    async def watch_progress(self) -> AsyncIterator[Progress]:
        """The current phase and each later one, until the worker is ready or has failed."""
        while True:
            changed = self._progress_changed
            yield self.progress
            if self.state not in ("loading", "recovering"):
                return
            await changed.wait()

    def report(self, progress: Progress) -> None:
        """A new phase or percentage; the phases before the engine's come from `lifecycle`."""
        self.progress = progress
        changed, self._progress_changed = self._progress_changed, asyncio.Event()
        changed.set()

    # --- requests ------------------------------------------------------------------------

    async def submit(self, request: InferenceRequest) -> Generation:
        """Returns once the engine has accepted it; raises what it was refused with."""
        self._admit(request)
        if not self._jobs:
            self._progress_at = time.monotonic()  # its work begins now
        job = self._jobs.add(request)
        if request.deadline is not None:
            remaining = request.deadline - time.monotonic() + DEADLINE_GRACE_SECONDS
            job.deadline = asyncio.get_running_loop().call_later(remaining, self._expire, job)
        self._send(Submit(job.request_id, request))
        try:
            return await job.accepted
        except asyncio.CancelledError:  # the client left before it was accepted
            self._jobs.cancel(request.job_id)
            raise

    def cancel(self, job_id: str) -> bool:
        """Idempotent; false only for a job that was never seen."""
        return self._jobs.cancel(job_id)

    async def call(self, make: Callable[[int], Command]) -> Any:
        """Ask the engine something beside its streams; `make` gets the call's id."""
        self._require_ready()
        if not self._jobs and not self._calls:
            self._progress_at = time.monotonic()
        call_id, reply = self._calls.open()
        self._send(make(call_id))
        try:
            return await reply
        finally:
            self._calls.close(call_id)

    def _admit(self, request: InferenceRequest) -> None:
        self._require_ready()
        if request in self._quarantine:
            self._metrics.request_quarantined()
            message = "This request was in flight at two engine crashes and is refused."
            fault = {"field": "prompt", "constraint": "quarantine", "message": message}
            raise InvalidRequest(message, errors=[fault])
        limits = self._settings
        waiting_tokens = self.queued_prompt_tokens
        if len(self._jobs) >= limits.slots + limits.max_queued_requests:
            raise self._queue_full(f"{limits.max_queued_requests} requests")
        if waiting_tokens >= limits.max_queued_prompt_tokens:
            raise self._queue_full(f"{limits.max_queued_prompt_tokens} prompt tokens")

    def _require_ready(self) -> None:
        if self._draining:
            raise ShuttingDown("The worker is shutting down and takes no new work.")
        if self._keeper.condition != "ready":
            raise NotReady(
                f"The worker is {self._keeper.condition}: {self.progress.phase}, "
                f"{self.progress.percent:.0f} %.",
                phase=self.progress.phase,
                percent=self.progress.percent,
            )

    def _queue_full(self, limit: str) -> QueueFull:
        pace = self._jobs.seconds_per_job
        wait = 1 if pace is None else min(max(math.ceil(pace * self._jobs.queued), 1), 120)
        return QueueFull(f"The queue is full: {limit} are waiting.", retry_after_seconds=wait)

    def _expire(self, job: Job) -> None:
        self._jobs.drop(job, InferenceTimeout("The request's deadline has passed."))

    def _tell_engine_to_drop(self, job: Job) -> None:
        self._cancelled_at[job.request_id] = time.monotonic()
        self._send(Cancel(job.request_id))

    def _job_left(self, job: Job) -> None:
        if self._draining and not self._jobs:
            self._drained.set()

    def _send(self, command: Command) -> None:
        self._keeper.send(command)

    # --- the engine's life ---------------------------------------------------------------

    async def start(self, config: EngineConfig) -> EngineInfo:
        """Spawn the engine and wait until it has decoded a token; raises why it could not."""
        info = await self._keeper.start(config)
        self._keeper.run(self._prove_residency())
        return info

    async def _prove_residency(self) -> None:
        """Ask again and again whether the model is still where it was put."""
        while True:
            await asyncio.sleep(RESIDENCY_INTERVAL_SECONDS)
            try:
                await self.call(ProveResidency)
            except ResidencyViolation as error:
                self.residency_lost = error.message
                self._log.error("residency.lost", message=error.message, **error.details)
                self.fail(error)
                self.report(self.progress)
                return
            except WorkerError as error:  # not ready, or crashed meanwhile: ask the next engine
                self._log.debug("residency.unasked", reason=error.message)

    def fail(self, error: WorkerError) -> None:
        """The worker is about to leave because of `error`."""
        self._keeper.fail(error)

    def begin_draining(self) -> None:
        """No new work from now on; what is accepted goes on."""
        self._draining = True
        self.report(self.progress)
        if not self._jobs:
            self._drained.set()

    async def drain(self, timeout_seconds: float) -> None:
        """Let the accepted requests finish; what is left after the time ends `SHUTTING_DOWN`."""
        try:
            await asyncio.wait_for(self._drained.wait(), timeout_seconds)
        except TimeoutError:
            error = ShuttingDown("The worker shut down before the request had finished.")
            for job in self._jobs:
                self._jobs.drop(job, error)

    async def stop(self) -> None:
        """End the engine process, whatever state it is in."""
        await self._keeper.stop()
        self._on_given_up(ShuttingDown("The worker has shut down."))

    def _on_ready(self) -> None:
        self._progress_at = time.monotonic()
        self.report(Progress("ready", 100.0))
        for job in self._jobs:  # those that the engine before had not started
            self._send(Submit(job.request_id, job.request))

    def _on_lost(self, error: WorkerError) -> None:
        self.stats = None
        self._cancelled_at.clear()
        for job in self._jobs:
            job.engines_lost += 1
            # Not accepted yet: the engine may have died of reading it.
            suspect = job.started or job.generation is None
            if suspect and self._quarantine.blame(job.request):
                self._log.warning("request.quarantined", job_id=job.request.job_id)
            if job.started or job.engines_lost > RESUBMITS:
                self._jobs.fail(job, error)
        self._calls.fail_all(error)

    def _on_given_up(self, error: WorkerError) -> None:
        self.report(self.progress)
        for job in self._jobs:
            self._jobs.fail(job, error)

    # --- frames --------------------------------------------------------------------------

    def _on_frame(self, events: list[Event]) -> None:
        streams: dict[int, list[StreamEvent]] = {}
        for event in events:
            match event:
                case Token() | Started() | Finished() | Failed():
                    streams.setdefault(event.request_id, []).append(event)
                case Stats():
                    self.stats = event
                    self._progress_at = time.monotonic()
                case Accepted():
                    self._jobs.on_accepted(event)
                case Rejected():
                    refusal = Failed(event.request_id, event.error)
                    streams.setdefault(event.request_id, []).append(refusal)
                case Reply():
                    if not self._jobs:  # else only steps are progress: replies are made aside
                        self._progress_at = time.monotonic()
                    self._calls.on_reply(event)
                case Progress():
                    self._keeper.progressed(event)
                case Ready():
                    self._keeper.started(event.info)
                case StartFailed():
                    self._keeper.start_failed(event.error)
        for request_id, stream in streams.items():
            self._on_stream(request_id, stream)

    def _on_stream(self, request_id: int, stream: list[StreamEvent]) -> None:
        job = self._jobs.get(request_id)
        if self._jobs.on_events(request_id, stream):
            if job is not None and isinstance(stream[-1], Finished):
                self._keeper.has_served = True
                self._quarantine.absolve(job.request)
        elif isinstance(stream[-1], Finished | Failed):
            cancelled_at = self._cancelled_at.pop(request_id, None)
            if cancelled_at is not None:  # only now are its cells free
                self._metrics.request_cancelled(time.monotonic() - cancelled_at)
