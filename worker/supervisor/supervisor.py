"""The engine as the rest of the API process sees it: requests in, streams of events out.

The supervisor passes requests to the engine and the engine's events to their jobs. `guardian` owns
the process, `job_table` the jobs. The caller of `Supervisor.open` reads the job's inbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from worker.errors import (
    Cancelled,
    EngineCrashed,
    InferenceTimeout,
    InvalidRequest,
    NotReady,
    ResidencyViolation,
    ShuttingDown,
    WorkerError,
)
from worker.observability.logs import get_logger
from worker.observability.metrics import Metrics
from worker.settings import Settings
from worker.supervisor import recovery
from worker.supervisor.engine_process import EngineProcess
from worker.supervisor.guardian import Condition, Guardian
from worker.supervisor.job import Inbox, Job, Stage, StreamEvent
from worker.supervisor.job_table import JobTable
from worker.supervisor.status import NO_STATS, Activity, State, WorkerStatus
from worker.wire.engine_info import EngineInfo
from worker.wire.messages import (
    Accepted,
    Cancel,
    End,
    EndReasoning,
    EngineFailed,
    Event,
    Failed,
    LoadModel,
    Preparing,
    Progress,
    PromptScored,
    Ready,
    Stats,
    Submit,
    Threads,
    Token,
)
from worker.wire.work import Embed, InferenceRequest, ProveResidency, Rank, Work

RESIDENCY_SECONDS = 15.0
"""Interval between two proofs that the model is still where it was placed."""
DEADLINE_GRACE_SECONDS = 0.25
"""The engine enforces deadlines between steps; the supervisor enforces them this much later."""
_log = get_logger()


class Supervisor:
    def __init__(self, settings: Settings, metrics: Metrics, engine: EngineProcess) -> None:
        """`engine` runs the first load; it may have been spawned already."""
        self.info: EngineInfo | None = None
        """Facts about the last engine that became ready; `None` before the first."""
        self._started_at = time.monotonic()
        self._progress = Progress("starting", 0.0)
        self._stats = NO_STATS
        self._residency_lost: str | None = None
        self._settings = settings
        self._metrics = metrics
        self.draining = False
        self._drained = asyncio.Event()
        self.changed = asyncio.Event()
        """Set once, at the next change of `state` or `progress`; a new event then replaces it."""
        self._guardian = Guardian(settings, metrics, self, engine)
        self.fatal = self._guardian.fatal
        self._jobs = JobTable(settings)
        self._next_request_id = 1
        self._dropped_at: dict[int, float] = {}
        """When each cancellation was sent that the engine has not confirmed yet, by request id."""
        self._holds_jobs = False
        """Whether any job may be `HELD`."""
        self._quarantine = recovery.Quarantine(settings.crash_window)
        self.has_served = False
        """Whether a client's job has ever been admitted."""
        self._used_at = time.monotonic()
        """When an engine last became ready, `wake` was called, or a client's job began or ended."""
        self._now = self._guardian.clock.now
        self._step_at = self._intake_at = 0.0
        """When the engine last made progress in a step, and in preparing a request, by `_now`."""

    # --- state for others ----------------------------------------------------------------

    @property
    def state(self) -> State:
        condition = self._guardian.condition
        return "draining" if self.draining and condition != "failed" else condition

    def status(self) -> WorkerStatus:
        """A snapshot of the worker's state, for everything that reports it."""
        info, serves = self.info, self._guardian.condition == "ready"
        stalled_seconds = self.stalled_seconds()
        return WorkerStatus(
            state=self.state,
            progress=self._progress,
            uptime_seconds=time.monotonic() - self._started_at,
            slots=self._jobs.slots,
            running=self._jobs.running,
            queued=self._jobs.queued,
            queued_prompt_tokens=self._jobs.queued_prompt_tokens,
            stalled_seconds=stalled_seconds,
            is_stalled=serves and stalled_seconds >= self._settings.stall_timeout,
            resident=serves and info is not None and info.residency.resident,
            residency_lost=self._residency_lost,
            error=self.fatal.result() if self.fatal.done() else None,
            info=info,
            stats=self._stats if serves else NO_STATS,  # some come while it falls asleep
            crashes=self._guardian.crashes.latest,
            running_adapters=self._names(running := self._jobs.adapters(with_slot=True)),
            waiting_adapters=self._names(self._jobs.adapters(with_slot=False) - running),
            sleeps_in_seconds=self._sleeps_in_seconds(),
        )

    def _names(self, adapters: set[int]) -> tuple[str, ...]:
        loaded = self._settings.adapters
        return tuple(loaded[number].name for number in sorted(adapters))

    def activities(self, most_waiting: int) -> list[Activity]:
        """The activity of all clients' jobs with a slot and of the first `most_waiting` without."""
        clients = [job for job in self._jobs if not job.is_internal]
        waiting = [job for job in clients if not job.has_slot][:most_waiting]
        return [job.activity for job in [j for j in clients if j.has_slot] + waiting]

    async def watch_progress(self, silence_seconds: float = 0.0) -> AsyncIterator[Progress]:
        """Yield the current progress, and then each change while the worker loads, recovers or
        wakes. Progress unchanged for `silence_seconds` is repeated, unless that is 0."""
        while True:
            changed = self.changed
            yield self._progress
            wakes = self.state == "sleeping" and self._guardian.wakes
            if self.state not in ("loading", "recovering") and not wakes:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), silence_seconds or None)

    def set_progress(self, progress: Progress) -> None:
        """Set the progress; `lifecycle` reports the phases before the engine's."""
        self._progress = progress
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    # --- requests ------------------------------------------------------------------------

    def cancel(self, job_id: str) -> bool:
        """Cancel a job; returns false if the name is unknown. A second call is harmless."""
        job = self._jobs.by_name.get(job_id)
        if job is None:
            return self._jobs.has_ended(job_id)
        self._drop(job, Cancelled("The job was cancelled."))
        return True

    def end_reasoning(self, job_id: str) -> bool:
        """Close a job's reasoning at its next token; false if no live job has that name."""
        job = self._jobs.by_name.get(job_id)
        if job is None:
            return False
        job.ends_reasoning = True
        self._end_reasoning(job)
        return True

    def _end_reasoning(self, job: Job) -> None:
        """Pass the client's wish on, once the engine has accepted the job and goes beyond what an
        earlier one sent."""
        if job.stage >= Stage.ACCEPTED and not job.is_repeating:
            self._guardian.engine.send(EndReasoning(job.request_id))

    def open(
        self,
        work: Work,
        deadline: float | None = None,
        inbox: Inbox | None = None,
        *,
        counts_prompt: bool = True,
        n_more: int = 0,
    ) -> Job:
        """Admit the work and send it to the engine; raises if it is not admitted.

        `deadline` is a time of `time.monotonic()`; an `InferenceRequest` brings its own. Jobs of
        one request share an `inbox`. While one of them runs, others are admitted even if the worker
        drains or its engine has died. Room is reserved for the `n_more` jobs of the request that
        follow; a caller that opens fewer calls `expect_no_more`.
        """
        inbox, condition = inbox or Inbox(), self._guardian.condition
        self._check_admission(work, condition, goes_on=bool(inbox.n_running))
        job = Job(
            *(self._next_request_id, work, self._metrics, self._drop, inbox, counts_prompt),
            clock=self._now,
        )
        self._jobs.add(job, n_more)
        self._next_request_id += 1
        if not job.is_internal:
            self.has_served, self._used_at = True, time.monotonic()
        if isinstance(work, InferenceRequest):
            deadline = work.deadline
        if deadline is not None:
            remaining = deadline - time.monotonic() + DEADLINE_GRACE_SECONDS
            passed = InferenceTimeout("The request's deadline has passed.")
            loop = asyncio.get_running_loop()
            job.deadline = loop.call_later(remaining, self._drop, job, passed)
        if condition == "ready":
            self._send(job)
        else:
            self._guardian.wake()
            job.enter(Stage.HELD)
            self._holds_jobs = True
        return job

    async def room(self, inbox: Inbox) -> None:
        """Wait until the queue has room for the prompt of a request's next job, checking at each
        event of its running jobs; none running counts as room."""
        most = self._settings.max_queued_prompt_tokens
        while inbox.n_running and self._jobs.queued_prompt_tokens >= most:
            await inbox.news()

    def expect_no_more(self, inbox: Inbox) -> None:
        """Release the room that `open` reserved for further jobs of a request."""
        self._jobs.expect_no_more(inbox)

    def _check_admission(self, work: Work, condition: Condition, *, goes_on: bool) -> None:
        """`goes_on` says that other jobs of the same request are running.

        Raises:
            ShuttingDown, NotReady: the worker takes no work in this state.
            InvalidRequest: the request is in quarantine.
        """
        if self.draining and condition != "failed" and not goes_on:
            raise ShuttingDown("The worker is shutting down and takes no new work.")
        if condition == "failed" or not (goes_on or condition in ("ready", "sleeping")):
            phase, percent = self._progress.phase, self._progress.percent
            why = f"The worker is {condition}: {phase}, {percent:.0f} %."
            raise NotReady(why, phase=phase, percent=percent)
        if work in self._quarantine:
            self._metrics.quarantined.inc()
            message = "This request is suspected of two engine crashes and is refused for now."
            field = work.field if isinstance(work, Embed | Rank) else "prompt"
            fault = {"field": field, "constraint": "quarantine", "message": message}
            raise InvalidRequest(message, errors=[fault])

    def _send(self, job: Job) -> None:
        """Send the job to the engine; a job that cannot be encoded ends here."""
        try:
            self._guardian.engine.send(Submit(job.request_id, job.submission()))
        except (ValueError, TypeError, RecursionError) as error:
            _log.warning("request.unsendable", job_id=job.job_id, reason=str(error))
            self._end(job, InvalidRequest("The request is nested too deeply or too large."))
        else:
            job.enter(Stage.SENT)

    def _drop(self, job: Job, error: WorkerError) -> None:
        """End the job with `error` and free its cells; a job that has ended is ignored."""
        if not job.has_ended:
            if job.stage != Stage.HELD:
                self._dropped_at[job.request_id] = time.monotonic()
                self._guardian.engine.send(Cancel(job.request_id))
            self._end(job, error)

    def _end(self, job: Job, error: WorkerError) -> None:
        self._deliver_end(job, [Failed(job.request_id, error)])

    def _deliver_end(self, job: Job, events: list[StreamEvent]) -> None:
        self._jobs.end(job, events)
        if not job.is_internal:
            self._used_at = time.monotonic()
        if self.draining and not self._jobs.n_clients:
            self._drained.set()

    # --- the engine's life, reported by the guardian ------------------------------------------

    async def start(self, config: LoadModel) -> EngineInfo:
        """Spawn the engine and wait until it has decoded a token; raises if it cannot."""
        info = await self._guardian.start(config)
        self._guardian.run(self._watch_residency())
        self._guardian.run(self._fall_asleep())
        return info

    async def _fall_asleep(self) -> None:
        """Put the worker to sleep whenever it has been idle for `--sleep-idle-seconds`."""
        while (left := self._sleeps_in_seconds()) is not None:
            if left or self.state != "ready":
                await asyncio.sleep(left or 1.0)
            else:
                self.sleep()

    def _sleeps_in_seconds(self) -> float | None:
        """Value of `WorkerStatus.sleeps_in_seconds`."""
        seconds = self._settings.sleep_idle_seconds
        if seconds is None or self._jobs.n_clients:
            return seconds
        return max(self._used_at + seconds - time.monotonic(), 0.0)

    def sleep(self) -> None:
        """End the engine until the next request; a sleeping worker keeps sleeping.

        Raises:
            NotReady: the worker is not ready, or has requests.
        """
        state = "waking" if self._guardian.wakes else self.state
        if state == "sleeping":
            return
        n_jobs = self._jobs.n_clients
        if state != "ready" or n_jobs:
            many = "a request" if n_jobs == 1 else f"{n_jobs} requests"
            why = f"it has {many}" if n_jobs else f"it is {state}"
            raise NotReady(f"The worker cannot sleep now: {why}.")
        self._guardian.sleep()
        self.set_progress(Progress("sleeping", 0.0))

    def wake(self) -> None:
        """Start an engine if the worker sleeps.

        Raises:
            NotReady: the worker is draining or has failed.
        """
        if (state := self.state) in ("draining", "failed"):
            raise NotReady(f"The worker cannot wake now: it is {state}.")
        self._used_at = time.monotonic()
        self._guardian.wake()

    async def _watch_residency(self) -> None:
        while self._residency_lost is None:
            await asyncio.sleep(RESIDENCY_SECONDS)
            if self.state == "sleeping":
                continue  # the model is not loaded
            try:
                await self.open(ProveResidency()).answer()
            except ResidencyViolation as error:
                _log.error("residency.lost", message=error.message, **error.details)
                self._residency_lost = error.message
                self.fail(error)
            except WorkerError as error:  # not ready, or it has just crashed: try again later
                _log.debug("residency.unasked", reason=error.message)

    def fail(self, error: WorkerError) -> None:
        """Make the worker exit with `error`."""
        self._guardian.fail(error)
        self.set_progress(self._progress)

    def begin_draining(self) -> None:
        """Admit no new work from now on; accepted requests continue."""
        self.draining = True
        self.set_progress(self._progress)
        if not self._jobs.n_clients:
            self._drained.set()

    async def drain(self, timeout_seconds: float) -> None:
        """Let the accepted requests finish; fail those that are left after the timeout."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), timeout_seconds)
        error = ShuttingDown("The worker shut down before the request had finished.")
        for job in self._jobs:
            self._drop(job, error)

    def cut_drain(self) -> None:
        """End the wait of `drain`."""
        self._drained.set()

    async def stop(self) -> None:
        """End the engine process, whatever its state."""
        await self._guardian.stop()
        self.on_given_up(ShuttingDown("The worker has shut down."))

    def stalled_seconds(self) -> float:
        """How long the engine has owed a job its acceptance or a step; 0 if it owes none."""
        return self._jobs.stalled_seconds(self._now(), self._intake_at, self._step_at)

    def on_pulse(self) -> None:
        """Count a sign of life from native code, in the middle of a step, as progress."""
        self._step_at = self._now()

    def on_ready(self, info: EngineInfo) -> None:
        self.info = info
        self._jobs.slots = info.slots
        self._used_at = time.monotonic()
        self.set_progress(Progress("ready", 100.0))
        self._send_held()

    def on_lost(self, error: EngineCrashed, in_hand: frozenset[int]) -> None:
        self._stats = NO_STATS
        self._jobs.preempt(())
        self._holds_jobs = True
        self._dropped_at.clear()
        survives = self._settings.survive_crashes
        for job in recovery.after_a_crash(self._jobs, in_hand, survives, self._quarantine):
            self._end(job, error)

    def _send_held(self) -> None:
        """Send the engine those held jobs that are due."""
        for job in recovery.due(self._jobs):
            self._send(job)
        self._holds_jobs = any(job.stage == Stage.HELD for job in self._jobs)

    def on_given_up(self, error: WorkerError) -> None:
        self.set_progress(self._progress)
        for job in self._jobs:
            self._end(job, error)

    def on_events(self, events: list[Event]) -> None:
        """Handle one frame of the engine's events."""
        streams: dict[int, list[StreamEvent]] = {}
        for event in events:
            match event:
                case Token(request_id=id):  # the most frequent event, so it is tested first
                    streams.setdefault(id, []).append(event)
                case Stats():
                    if event.preempted != self._stats.preempted:
                        self._jobs.preempt(event.preempted)
                    self._stats = event
                    self._step_at = self._now()
                case Threads(threads, why):
                    assert self.info is not None, "it has served"
                    self.info = replace(self.info, threads=threads, threads_derivation=why)
                case Preparing():
                    self._intake_at = self._now()
                case Accepted():
                    self._intake_at = self._now()
                    if (job := self._jobs.by_id.get(event.request_id)) is not None:
                        job.accept(event)
                        if job.ends_reasoning:
                            self._end_reasoning(job)
                case Progress() | EngineFailed() | Ready():
                    self._guardian.follow(event)
                case PromptScored(request_id=id):
                    job = self._jobs.by_id.get(id)
                    if job is not None and (whole := job.gather(event)) is not None:
                        streams.setdefault(id, []).append(whole)
                case _:
                    streams.setdefault(event.request_id, []).append(event)
        for request_id, stream in streams.items():
            job = self._jobs.by_id.get(request_id)
            is_end = isinstance(stream[-1], End)
            if job is None:
                if is_end and (dropped_at := self._dropped_at.pop(request_id, None)) is not None:
                    # Its cells are free now.
                    self._metrics.cancel.observe(time.monotonic() - dropped_at)
            elif job.engine_restarts or is_end:
                self._feed(job, stream)
            else:
                job.feed(stream)
        if self._holds_jobs and self._guardian.condition == "ready":
            self._send_held()

    def _feed(self, job: Job, stream: list[StreamEvent]) -> None:
        """Feed a job that ends, or that continues after a crash, its events of one frame."""
        if job.engine_restarts:
            was_repeating = job.is_repeating
            try:
                stream = job.continued(stream)
            except EngineCrashed as error:
                return self._drop(job, error)
            if was_repeating and job.ends_reasoning:
                self._end_reasoning(job)
        if not stream:
            return
        last = stream[-1]
        if not isinstance(last, End):
            return job.feed(stream)
        if job.stage == Stage.SENT and not job.is_internal:  # a proof can pass a stuck request
            self._intake_at = self._now()
        if not isinstance(last, Failed):
            self._quarantine.absolve(job.work)
            self._guardian.engine.has_answered = True
        self._deliver_end(job, stream)
