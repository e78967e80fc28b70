"""Every request that was promised an answer, from its submission to its one terminal event.

Lives on the event loop of the API process and belongs to the supervisor. `end` is the only way
out of the table, so it is also the one place that asserts: exactly one terminal event each.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from worker.engine.generation import Generation, StreamEvent
from worker.errors import Cancelled, DuplicateJob, WorkerError
from worker.messages import Accepted, Failed, Finished, InferenceRequest, Started

_ENDED_NAMES_KEPT = 65536
_RATE_SAMPLES = 64


@dataclass(slots=True, eq=False)
class Job:
    request_id: int
    request: InferenceRequest
    accepted: asyncio.Future[Generation]
    generation: Generation | None = None
    started: bool = False
    engines_lost: int = 0
    """Engine processes that died while this waited for a slot."""
    deadline: asyncio.TimerHandle | None = field(default=None, repr=False)


class Jobs:
    """The table of live jobs, by request id and by job id."""

    def __init__(self, on_cancel: Callable[[Job], None], on_end: Callable[[Job], None]) -> None:
        """`on_cancel`: the engine should drop it. `on_end`: it left the table, for any reason."""
        self._on_cancel = on_cancel
        self._on_end = on_end
        self._by_id: dict[int, Job] = {}
        self._by_name: dict[str, Job] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._next_id = 1
        self._finish_times: deque[float] = deque(maxlen=_RATE_SAMPLES)
        self.running = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Job]:
        """In order of submission; over a copy, so that jobs may end meanwhile."""
        return iter(list(self._by_id.values()))

    @property
    def queued(self) -> int:
        return len(self._by_id) - self.running

    @property
    def queued_prompt_tokens(self) -> int:
        waiting = (job.generation for job in self._by_id.values() if not job.started)
        return sum(generation.prompt_tokens for generation in waiting if generation is not None)

    @property
    def seconds_per_job(self) -> float | None:
        """Measured over the latest ends; `None` until there are two."""
        if len(self._finish_times) < 2:
            return None
        return (self._finish_times[-1] - self._finish_times[0]) / (len(self._finish_times) - 1)

    def add(self, request: InferenceRequest) -> Job:
        if request.job_id in self._by_name:
            raise DuplicateJob(f"A job with the id {request.job_id!r} is running already.")
        job = Job(self._next_id, request, asyncio.get_running_loop().create_future())
        self._next_id += 1
        self._by_id[job.request_id] = job
        self._by_name[request.job_id] = job
        return job

    def get(self, request_id: int) -> Job | None:
        return self._by_id.get(request_id)

    def cancel(self, job_id: str) -> bool:
        """End it with `Cancelled` now; false if no job of that id was ever seen."""
        job = self._by_name.get(job_id)
        if job is None:
            return job_id in self._ended
        self.drop(job, Cancelled("The job was cancelled."))
        return True

    def drop(self, job: Job, error: WorkerError) -> None:
        """End it with `error` now and have the engine free its cells; an ended one is ignored."""
        if self._by_id.get(job.request_id) is job:
            self._on_cancel(job)
            self.fail(job, error)

    def fail(self, job: Job, error: WorkerError) -> None:
        self.end(job, [Failed(job.request_id, error)])

    # --- what the engine says ---

    def on_accepted(self, event: Accepted) -> None:
        job = self._by_id.get(event.request_id)
        if job is None:
            return
        if job.generation is not None:  # accepted again by the engine that replaced a dead one
            job.generation.prompt_tokens = event.prompt_tokens
            return
        job.generation = Generation(
            job.request.job_id,
            job.request_id,
            event.prompt_tokens,
            job.request.sampling.seed,
            cancel=lambda: self.drop(job, Cancelled("The client gave the job up.")),
        )
        if not job.accepted.done():
            job.accepted.set_result(job.generation)

    def on_events(self, request_id: int, events: list[StreamEvent]) -> bool:
        """One frame's events of one request, in order; false if it has ended here already."""
        job = self._by_id.get(request_id)
        if job is None:
            return False
        if not job.started and any(type(event) is Started for event in events):
            job.started = True
            self.running += 1
        if isinstance(events[-1], Finished | Failed):
            self.end(job, events)
        elif job.generation is not None:
            job.generation.feed(events)
        return True

    def end(self, job: Job, events: list[StreamEvent]) -> None:
        """The one way out: deliver `events`, whose last is terminal, and forget the job."""
        terminal = events[-1]
        assert isinstance(terminal, Finished | Failed), "a job ends with a terminal event"
        assert self._by_id.pop(job.request_id, None) is job, "a second terminal event"
        del self._by_name[job.request.job_id]
        self._remember(job.request.job_id)
        self.running -= job.started
        if job.deadline is not None:
            job.deadline.cancel()
        if isinstance(terminal, Finished):
            self._finish_times.append(time.monotonic())
        if job.generation is not None:
            job.generation.feed(events, last=True)
        elif isinstance(terminal, Failed) and not job.accepted.done():
            job.accepted.set_exception(terminal.error)
        self._on_end(job)

    def _remember(self, job_id: str) -> None:
        self._ended[job_id] = None
        self._ended.move_to_end(job_id)
        if len(self._ended) > _ENDED_NAMES_KEPT:
            self._ended.popitem(last=False)
