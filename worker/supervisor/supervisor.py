"""The engine as the rest of the API process sees it: requests in, streams of events out.

It passes requests to the engine and the engine's events to their jobs. `guardian` owns the process,
`job_table` the jobs. Only `submit` and `ask` wait for the engine: until it accepts, or answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from typing import Any

from worker.errors import (
    Cancelled,
    EngineCrashed,
    InferenceTimeout,
    InvalidRequest,
    NotReady,
    QueueFull,
    ResidencyViolation,
    ShuttingDown,
    WorkerError,
)
from worker.observability.logs import get_logger
from worker.observability.metrics import Metrics
from worker.settings import Settings
from worker.supervisor import recovery
from worker.supervisor.engine_process import EngineProcess
from worker.supervisor.guardian import Guardian
from worker.supervisor.job import Job, Stage, StreamEvent, by_request
from worker.supervisor.job_table import JobTable
from worker.supervisor.quarantine import Quarantine
from worker.supervisor.status import NO_STATS, State, WorkerStatus
from worker.wire.engine_info import EngineInfo
from worker.wire.messages import (
    Accepted,
    Answered,
    Cancel,
    Event,
    Failed,
    Finished,
    LoadModel,
    Progress,
    Stats,
    Submit,
)
from worker.wire.work import InferenceRequest, ProveResidency, Work

RESIDENCY_SECONDS = 15.0
"""Between two proofs that the model is still where it was placed."""
DEADLINE_GRACE_SECONDS = 0.25
"""The engine enforces deadlines between two steps; the supervisor does so this much later."""


class Supervisor:
    def __init__(
        self, settings: Settings, metrics: Metrics, engine: EngineProcess | None = None
    ) -> None:
        """`engine` is for the first load; without it one is spawned then."""
        self._started_at = time.monotonic()
        self._progress = Progress("starting", 0.0)
        self._stats = NO_STATS
        self._residency_lost: str | None = None
        self._settings = settings
        self._metrics = metrics
        self._log = get_logger()
        self.draining = False
        self._drained = asyncio.Event()
        self.changed = asyncio.Event()
        """Set once, at the next change of `state` or `progress`; a new event then replaces it."""
        self._guardian = Guardian(settings, metrics, self, engine or EngineProcess())
        self._jobs = JobTable()
        self._next_request_id = 1
        self._cancelled_at: dict[int, float] = {}
        """When the engine was asked to drop each request that it has not confirmed yet."""
        self._holds_jobs = False
        """Whether jobs of an engine that died still wait for the next engine."""
        self._quarantine = Quarantine(settings.crash_window)
        self._step_at = self._intake_at = 0.0
        """When the engine last computed a step, and when it last accepted a request."""

    # --- state for others ----------------------------------------------------------------

    @property
    def state(self) -> State:
        condition = self._guardian.condition
        return "draining" if self.draining and condition != "failed" else condition

    @property
    def info(self) -> EngineInfo | None:
        """The info of the engine that serves, or of the last one that did."""
        return self._guardian.info

    def status(self) -> WorkerStatus:
        """The worker's state now, for everything that tells it."""
        info, serves = self.info, self._guardian.condition == "ready"
        stalled_seconds = self.stalled_seconds()
        return WorkerStatus(
            state=self.state,
            progress=self._progress,
            uptime_seconds=time.monotonic() - self._started_at,
            running=self._jobs.running,
            queued=self._jobs.queued,
            queued_prompt_tokens=self._jobs.queued_prompt_tokens,
            stalled_seconds=stalled_seconds,
            is_stalled=serves and stalled_seconds >= self._settings.stall_timeout,
            resident=serves and info is not None and info.residency.resident,
            residency_lost=self._residency_lost,
            error=self.fatal.result() if self.fatal.done() else None,
            info=info,
            stats=self._stats,
            crashes=self._guardian.crashes.latest,
        )

    @property
    def fatal(self) -> asyncio.Future[WorkerError]:
        """Set once, when the worker cannot serve any more and must leave with that error."""
        return self._guardian.fatal

    async def watch_progress(self) -> AsyncIterator[Progress]:
        """The current phase and each later one, until the worker is ready or has failed."""
        while True:
            changed = self.changed
            yield self._progress
            if self.state not in ("loading", "recovering"):
                return
            await changed.wait()

    def set_progress(self, progress: Progress) -> None:
        """Set the phase and percentage; `lifecycle` reports the phases before the engine's."""
        self._progress = progress
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    # --- requests ------------------------------------------------------------------------

    async def submit(self, work: Work, deadline: float | None = None) -> Job:
        """Open a job and wait until the engine has accepted it; raises its refusal."""
        job = self.open(work, deadline)
        try:
            await job.accepted()
        except asyncio.CancelledError:  # the client left before that
            job.cancel()
            raise
        return job

    async def ask(self, work: Work, deadline: float | None = None) -> Any:
        """The answer to work that generates no text; cancelling the task cancels the work."""
        job = self.open(work, deadline)
        try:
            return await job.answer()
        finally:
            job.cancel()

    def cancel(self, job_id: str) -> bool:
        """Cancel a job; false only if it was never seen. A second call is harmless."""
        job = self._jobs.named(job_id)
        if job is None:
            return self._jobs.has_ended(job_id)
        self._drop(job, Cancelled("The job was cancelled."))
        return True

    def open(self, work: Work, deadline: float | None) -> Job:
        """Admit the work and send it to the engine; raises if it is not admitted.

        `deadline` is a time of `time.monotonic()`.
        """
        job = Job(self._next_request_id, work, self._metrics, self._drop)
        try:
            self._check_admission(job)
            self._jobs.add(job)
        except WorkerError as error:
            self._metrics.rejected.labels(error.code).inc()
            raise
        self._next_request_id += 1
        if isinstance(work, InferenceRequest):
            deadline = work.deadline
        if deadline is not None:
            remaining = deadline - time.monotonic() + DEADLINE_GRACE_SECONDS
            passed = InferenceTimeout("The request's deadline has passed.")
            loop = asyncio.get_running_loop()
            job.deadline = loop.call_later(remaining, self._drop, job, passed)
        self._send(job)
        return job

    def _check_admission(self, job: Job) -> None:
        """Check that the job may join the others.

        Raises:
            ShuttingDown, NotReady: the worker takes no work in this state.
            InvalidRequest: the request is in quarantine.
            QueueFull: too many requests, or too many prompt tokens, are waiting.
        """
        if self.state == "draining":
            raise ShuttingDown("The worker is shutting down and takes no new work.")
        if self.state != "ready":
            phase, percent = self._progress.phase, self._progress.percent
            raise NotReady(
                f"The worker is {self.state}: {phase}, {percent:.0f} %.",
                phase=phase,
                percent=percent,
            )
        if job.is_internal:
            return
        if job.work in self._quarantine:
            self._metrics.quarantined.inc()
            message = "This request is suspected of two engine crashes and is refused for now."
            fault = {"field": "prompt", "constraint": "quarantine", "message": message}
            raise InvalidRequest(message, errors=[fault])
        limits = self._settings
        full = None
        if len(self._jobs) >= limits.engine.slots + limits.max_queued_requests:
            full = f"{limits.max_queued_requests} requests"
        elif self._jobs.queued_prompt_tokens >= limits.max_queued_prompt_tokens:
            full = f"{limits.max_queued_prompt_tokens} prompt tokens"
        if full is not None:
            pace = self._jobs.seconds_per_job
            wait = 1 if pace is None else min(max(math.ceil(pace * self._jobs.queued), 1), 120)
            raise QueueFull(f"The queue is full: {full} are waiting.", retry_after_seconds=wait)

    def _send(self, job: Job) -> None:
        """Send the job to the engine; a job that cannot be sent ends here."""
        try:
            self._guardian.send(Submit(job.request_id, job.submission()))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            self._log.warning("request.unsendable", job_id=job.job_id, reason=str(error))
            fault = "The request is nested too deeply or too large."
            if isinstance(error, OverflowError):
                fault = "An integer in the request has more than 64 bits."
            self._end(job, InvalidRequest(fault))
        else:
            job.enter(Stage.SENT)

    def _drop(self, job: Job, error: WorkerError) -> None:
        """End the job with `error` and free its cells; a job that has ended is ignored."""
        if not job.has_ended:
            if job.stage != Stage.HELD:
                self._cancelled_at[job.request_id] = time.monotonic()
                self._guardian.send(Cancel(job.request_id))
            self._end(job, error)

    def _end(self, job: Job, error: WorkerError) -> None:
        self._deliver_end(job, [Failed(job.request_id, error)])

    def _deliver_end(self, job: Job, events: list[StreamEvent]) -> None:
        self._jobs.end(job, events)
        if self.draining and not self._jobs:
            self._drained.set()

    # --- the engine's life, reported by the guardian ------------------------------------------

    async def start(self, config: LoadModel) -> EngineInfo:
        """Spawn the engine and wait until it has decoded a token; raises if it cannot."""
        info = await self._guardian.start(config)
        self._guardian.run(self._watch_residency())
        return info

    async def _watch_residency(self) -> None:
        while self._residency_lost is None:
            await asyncio.sleep(RESIDENCY_SECONDS)
            try:
                await self.ask(ProveResidency())
            except ResidencyViolation as error:
                self._log.error("residency.lost", message=error.message, **error.details)
                self._residency_lost = error.message
                self.fail(error)
            except WorkerError as error:  # not ready, or just crashed: ask again later
                self._log.debug("residency.unasked", reason=error.message)

    def fail(self, error: WorkerError) -> None:
        """Make the worker leave with `error`."""
        self._guardian.fail(error)
        self.set_progress(self._progress)

    def begin_draining(self) -> None:
        """Take no new work from now on; accepted requests go on."""
        self.draining = True
        self.set_progress(self._progress)
        if not self._jobs:
            self._drained.set()

    async def drain(self, timeout_seconds: float) -> None:
        """Let the accepted requests finish; after the timeout, fail those that are left."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), timeout_seconds)
        error = ShuttingDown("The worker shut down before the request had finished.")
        for job in self._jobs:
            self._drop(job, error)

    def cut_drain(self) -> None:
        """Let `drain` wait no longer."""
        self._drained.set()

    async def stop(self) -> None:
        """End the engine process in whatever state it is."""
        await self._guardian.stop()
        self.on_given_up(ShuttingDown("The worker has shut down."))

    def stalled_seconds(self) -> float:
        resumed_at = self._guardian.resumed_at
        intake_at, step_at = max(self._intake_at, resumed_at), max(self._step_at, resumed_at)
        return self._jobs.stalled_seconds(intake_at, step_at)

    def on_ready(self) -> None:
        self.set_progress(Progress("ready", 100.0))
        self._send_held()

    def on_lost(self, error: EngineCrashed, in_hand: frozenset[int]) -> None:
        self._stats = NO_STATS
        self._holds_jobs = True
        self._cancelled_at.clear()
        survives = self._settings.survive_crashes
        for job in recovery.after_a_crash(self._jobs, in_hand, survives, self._quarantine):
            self._end(job, error)

    def _send_held(self) -> None:
        """Send jobs of the engine that died to the next one."""
        for job in recovery.due(self._jobs):
            self._send(job)
        self._holds_jobs = any(job.stage == Stage.HELD for job in self._jobs)

    def on_given_up(self, error: WorkerError) -> None:
        self.set_progress(self._progress)
        for job in self._jobs:
            self._end(job, error)

    def on_events(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Stats():
                    self._stats = event
                    self._step_at = time.monotonic()
                case Accepted():
                    self._intake_at = time.monotonic()
                    if (job := self._jobs.get(event.request_id)) is not None:
                        job.accept(event)
        for request_id, stream in by_request(events).items():
            self._on_stream(request_id, stream)
        if self._holds_jobs and self._guardian.condition == "ready":
            self._send_held()

    def _on_stream(self, request_id: int, stream: list[StreamEvent]) -> None:
        """Handle one frame's events of one request, in order."""
        job = self._jobs.get(request_id)
        if job is None:
            if isinstance(stream[-1], Finished | Answered | Failed):
                cancelled_at = self._cancelled_at.pop(request_id, None)
                if cancelled_at is not None:  # its cells are free now
                    self._metrics.cancel.observe(time.monotonic() - cancelled_at)
            return
        if job.engine_restarts:
            try:
                stream = job.continued(stream)
            except EngineCrashed as error:
                return self._drop(job, error)
            if not stream:
                return
        last = stream[-1]
        if not isinstance(last, Finished | Answered | Failed):
            return job.feed(stream)
        if job.stage == Stage.SENT:
            self._intake_at = time.monotonic()
        if isinstance(last, Finished):
            self._quarantine.absolve(job.work)
        self._deliver_end(job, stream)
