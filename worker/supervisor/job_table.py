"""The live jobs, each from its submission until its terminal event.

A job leaves only through `end`, so it gets exactly one terminal event.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator

from worker.errors import DuplicateJob
from worker.supervisor.job import Job, Stage, StreamEvent
from worker.wire.messages import Answered, Failed, Finished

_ENDED_NAMES_KEPT = 65536
_PACE_SAMPLES = 64


class JobTable:
    def __init__(self) -> None:
        self._by_id: dict[int, Job] = {}
        self._by_name: dict[str, Job] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._finish_times: deque[float] = deque(maxlen=_PACE_SAMPLES)

    def __len__(self) -> int:
        """The number of clients' jobs."""
        return sum(not job.is_internal for job in self._by_id.values())

    def __iter__(self) -> Iterator[Job]:
        """The jobs in order of submission; a copy, so that jobs may end during the iteration."""
        return iter(list(self._by_id.values()))

    @property
    def running(self) -> int:
        """The number of jobs with a slot."""
        return sum(job.has_slot for job in self._by_id.values())

    @property
    def queued(self) -> int:
        """The number of clients' jobs without a slot."""
        return sum(not job.has_slot and not job.is_internal for job in self._by_id.values())

    @property
    def queued_prompt_tokens(self) -> int:
        return sum(job.prompt_tokens for job in self._by_id.values() if not job.has_slot)

    @property
    def seconds_per_job(self) -> float | None:
        """The mean time between the latest finished jobs; `None` until there are two."""
        if len(self._finish_times) < 2:
            return None
        return (self._finish_times[-1] - self._finish_times[0]) / (len(self._finish_times) - 1)

    def stalled_seconds(self, intake_at: float, step_at: float) -> float:
        """How long the engine has owed a job its acceptance or a step; 0 if it owes none.

        The arguments are the times of its last acceptance and of its last step.
        """
        now, longest = time.monotonic(), 0.0
        for job in self._by_id.values():
            if job.stage != Stage.HELD:
                progress_at = intake_at if job.stage == Stage.SENT else step_at
                longest = max(longest, now - max(job.stage_since, progress_at))
        return longest

    def add(self, job: Job) -> None:
        name = job.job_id
        if name is not None:
            if name in self._by_name:
                raise DuplicateJob(f"A job with the id {name!r} is running already.")
            self._by_name[name] = job
        self._by_id[job.request_id] = job

    def get(self, request_id: int) -> Job | None:
        return self._by_id.get(request_id)

    def named(self, job_id: str) -> Job | None:
        return self._by_name.get(job_id)

    def has_ended(self, job_id: str) -> bool:
        """Whether a job of that name has ended; only the latest names are kept."""
        return job_id in self._ended

    def end(self, job: Job, events: list[StreamEvent]) -> None:
        """Deliver `events`, of which the last is terminal, and forget the job."""
        assert isinstance(events[-1], Finished | Answered | Failed), "not a terminal event"
        del self._by_id[job.request_id]
        if (name := job.job_id) is not None:
            del self._by_name[name]
            self._ended[name] = None
            self._ended.move_to_end(name)
            if len(self._ended) > _ENDED_NAMES_KEPT:
                self._ended.popitem(last=False)
        if job.deadline is not None:
            job.deadline.cancel()
        if isinstance(events[-1], Finished):
            self._finish_times.append(time.monotonic())
        job.feed(events)
