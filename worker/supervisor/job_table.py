"""The live jobs, each from its submission until its terminal event.

A job leaves only through `end`, so it gets exactly one terminal event.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator

from worker.errors import DuplicateJob, InvalidRequest, QueueFull
from worker.expectations import counted
from worker.settings import Settings
from worker.supervisor.job import Inbox, Job, Stage, StreamEvent
from worker.wire.messages import End, Failed
from worker.wire.work import Embed, InferenceRequest, Rank

_ENDED_NAMES_KEPT = 65536
_PACE_SAMPLES = 64


class JobTable:
    def __init__(self, settings: Settings) -> None:
        self._limits = settings
        self.slots = settings.engine.slots
        """The engine's number once it is known: an embedder has one slot, whatever the setting."""
        self.by_id: dict[int, Job] = {}
        """The live jobs in order of submission."""
        self.by_name: dict[str, Job] = {}
        """The live jobs with a name from their client."""
        self.n_clients = 0
        """The number of jobs that clients wait for."""
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._finish_times: deque[float] = deque(maxlen=_PACE_SAMPLES)
        """When the latest jobs finished, by a clock that stands still while there are no jobs."""
        self._n_to_come: dict[Inbox, int] = {}
        """The number of jobs that room is reserved for, by the inbox of their request."""
        self._idle_seconds, self._idle_since = 0.0, time.monotonic()

    def __iter__(self) -> Iterator[Job]:
        """The jobs in order of submission; a copy, so that jobs may end during the iteration."""
        return iter(list(self.by_id.values()))

    @property
    def running(self) -> int:
        """The number of jobs with a slot."""
        return sum(job.has_slot for job in self.by_id.values())

    @property
    def queued(self) -> int:
        """The number of clients' jobs without a slot."""
        return sum(not job.has_slot and not job.is_internal for job in self.by_id.values())

    @property
    def queued_prompt_tokens(self) -> int:
        return sum(job.prompt_tokens for job in self.by_id.values() if not job.has_slot)

    def adapters(self, *, with_slot: bool) -> set[int]:
        """The numbers of the LoRA adapters of jobs with or without a slot."""
        works = (job.work for job in self.by_id.values() if job.has_slot == with_slot)
        asking = (work for work in works if isinstance(work, InferenceRequest | Embed | Rank))
        return {number for work in asking for number, _ in work.adapters}

    def preempt(self, request_ids: Collection[int]) -> None:
        """Record which jobs have lost their slots for now; all others have not."""
        for id, job in self.by_id.items():
            job.is_preempted = id in request_ids

    def stalled_seconds(self, now: float, intake_at: float, step_at: float) -> float:
        """How long the engine has owed a job its acceptance or a step; 0 if it owes none.

        It last prepared a request at `intake_at`, and computed at `step_at`, by the jobs' clock.
        """
        longest = 0.0
        for job in self.by_id.values():
            if job.stage != Stage.HELD:
                progress_at = intake_at if job.stage == Stage.SENT else step_at
                longest = max(longest, now - max(job.stage_since, progress_at))
        return longest

    def add(self, job: Job, n_more: int = 0) -> None:
        """Add a job, and reserve room for `n_more` of its request until they are added.

        Raises:
            QueueFull: too many requests, or too many prompt tokens, are waiting.
            InvalidRequest: the request has more jobs than there ever is room for.
            DuplicateJob: a live job has its name.
        """
        limits, inbox = self._limits, job.inbox
        n_kept = self._n_to_come.pop(inbox, 0)
        if not job.is_internal:
            most = self.slots + limits.max_queued_requests
            if n_more >= most:
                why = f"at most {counted(most, 'answer')} can wait or run (--max-queued-requests)"
                raise InvalidRequest(f"{n_more + 1} answers are too many: {why}.")
            n_taken = self.n_clients + sum(self._n_to_come.values())
            if not n_kept and n_taken + n_more >= most:
                raise self._full(counted(limits.max_queued_requests, "request"))
            if not n_kept and self.queued_prompt_tokens >= limits.max_queued_prompt_tokens:
                raise self._full(counted(limits.max_queued_prompt_tokens, "prompt token"))
        if (name := job.job_id) is not None:
            if name in self.by_name:
                raise DuplicateJob(f"A job with the id {name!r} is already running.")
            self.by_name[name] = job
        if n_to_come := max(n_kept - 1, n_more):
            self._n_to_come[inbox] = n_to_come
        if not self.by_id:
            self._idle_seconds += time.monotonic() - self._idle_since
        self.by_id[job.request_id] = job
        self.n_clients += not job.is_internal

    def expect_no_more(self, inbox: Inbox) -> None:
        """Release the room that is reserved for a request."""
        self._n_to_come.pop(inbox, None)

    def _full(self, limit: str) -> QueueFull:
        """The refusal, with the time until the queue is empty at the pace of the latest jobs."""
        times, seconds = self._finish_times, 1
        if len(times) >= 2:
            seconds_per_job = (times[-1] - times[0]) / (len(times) - 1)
            seconds = min(max(math.ceil(seconds_per_job * self.queued), 1), 120)
        message = f"The queue is full: at most {limit} may wait."
        return QueueFull(message, retry_after_seconds=seconds)

    def has_ended(self, job_id: str) -> bool:
        """Whether a job of that name has ended; only the latest names are kept."""
        return job_id in self._ended

    def end(self, job: Job, events: list[StreamEvent]) -> None:
        """Deliver `events`, the last of which is terminal, and forget the job."""
        assert isinstance(events[-1], End), "not a terminal event"
        del self.by_id[job.request_id]
        self.n_clients -= not job.is_internal
        if (name := job.job_id) is not None:
            del self.by_name[name]
            self._ended[name] = None
            self._ended.move_to_end(name)
            if len(self._ended) > _ENDED_NAMES_KEPT:
                self._ended.popitem(last=False)
        if job.deadline is not None:
            job.deadline.cancel()
        now = time.monotonic()
        if job.is_accepted and not isinstance(events[-1], Failed):
            self._finish_times.append(now - self._idle_seconds)
        if not self.by_id:
            self._idle_since = now
        job.feed(events)
