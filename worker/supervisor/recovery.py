"""Decides which jobs continue after an engine died, in which order, and which are blamed for it.

A suspect is a job that the engine was working on when it died. Suspects continue last and one at a
time: if the next engine dies too, the culprit is known.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from worker.observability.logs import get_logger
from worker.supervisor.job import Job, Stage
from worker.wire.work import InferenceRequest, Work

_log = get_logger()

CRASHES_TO_QUARANTINE = 2
_SUSPECTS_KEPT = 4096


class Quarantine:
    """Remembers suspected requests, by fingerprint.

    Two crashes within the window put a request into quarantine until one of them is older than the
    window. A request that finishes after its first crash is cleared at once.
    """

    def __init__(self, window_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_seconds = window_seconds
        self._clock = clock
        self._crashes: dict[str, list[float]] = {}
        """The times of each request's crashes; the request blamed last comes last."""

    def __contains__(self, work: Work) -> bool:
        if self._crashes:
            self._forget_old()  # before the fingerprint, which is costly and then rarely needed
        return bool(self._crashes) and self._is_poison(fingerprint(work))

    def blame(self, suspects: Iterable[Work]) -> set[str]:
        """Record a crash, which counts once for equal requests; returns the fingerprints of those
        suspects that are now in quarantine."""
        self._forget_old()
        keys = set(map(fingerprint, suspects))
        for key in keys:
            self._crashes[key] = [*self._crashes.pop(key, ()), self._clock()]
            if len(self._crashes) > _SUSPECTS_KEPT:
                del self._crashes[next(iter(self._crashes))]
        return set(filter(self._is_poison, keys))

    def absolve(self, work: Work) -> None:
        """Clear a request that finished, unless it is in quarantine."""
        if self._crashes:
            self._forget_old()
            if not self._is_poison(key := fingerprint(work)):
                self._crashes.pop(key, None)

    def _is_poison(self, key: str) -> bool:
        return len(self._crashes.get(key, ())) >= CRASHES_TO_QUARANTINE

    def _forget_old(self) -> None:
        since = self._clock() - self._window_seconds
        recent = {key: [at for at in times if at > since] for key, times in self._crashes.items()}
        self._crashes = {key: times for key, times in recent.items() if times}


def fingerprint(work: Work) -> str:
    """A hash of all that determines the computation, except the seed, which a retry may redraw."""
    if isinstance(work, InferenceRequest):
        sampling = replace(work.sampling, seed=0)
        work = replace(
            work, job_id="", sampling=sampling, deadline=None, cache_salt=None,
            reports_progress=False,
        )  # fmt: skip
    return hashlib.sha256(repr(work).encode("utf-8", "surrogatepass")).hexdigest()


def after_a_crash(
    jobs: Iterable[Job], in_hand: frozenset[int], survive_crashes: int, quarantine: Quarantine
) -> list[Job]:
    """Hold each job for the next engine; returns those that must end instead.

    Each suspect spends one of the crashes that it may survive; other jobs spend none. If it is
    unknown what the engine had in hand, and nobody is suspect, each started job spends one. All
    jobs whose request is now in quarantine end, even those that were only waiting.
    """
    jobs = list(jobs)
    lost = [job for job in jobs if job.stage != Stage.HELD]
    suspects = _suspects(lost, in_hand)
    poison = quarantine.blame(job.work for job in suspects)
    for job in lost:
        job.is_suspect = job in suspects
        job.engine_restarts += job.has_started
        if job.is_suspect or (not suspects and not in_hand and job.has_started):
            job.crashes_spent += 1
        job.enter(Stage.HELD)
    condemned = []
    for job in jobs:
        is_poison = bool(poison) and fingerprint(job.work) in poison
        if is_poison:
            _log.warning("request.quarantined", job_id=job.job_id)
        if is_poison or job.crashes_spent > survive_crashes:
            condemned.append(job)
    return condemned


def _suspects(lost: list[Job], in_hand: frozenset[int]) -> list[Job]:
    """The jobs in hand, without those that have ended since. If nothing was in hand: the jobs that
    had started and had no token yet; else the only started job; else the only job."""
    asked = [job for job in lost if not job.is_internal]
    if in_hand:
        return [job for job in asked if job.request_id in in_hand]
    running = [job for job in asked if job.has_started]
    return (
        [job for job in running if job.stage == Stage.STARTED]
        or (running if len(running) == 1 else [])
        or (asked if len(asked) == 1 else [])
    )


def due(jobs: Iterable[Job]) -> list[Job]:
    """The held jobs that may go to the engine now: all that are not suspects; else one suspect, as
    soon as the one before it, and all that continue answers, have produced a token or ended."""
    jobs = list(jobs)
    held = [job for job in jobs if job.stage == Stage.HELD]
    innocent = [job for job in held if not job.is_suspect]
    if innocent:
        return innocent
    under_way = any(
        Stage.HELD < job.stage < Stage.PRODUCING and (job.is_suspect or job.tokens_out)
        for job in jobs
    )
    return [] if under_way else held[:1]
