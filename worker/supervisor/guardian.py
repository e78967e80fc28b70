"""Keeps an engine process alive: spawns it, watches it, replaces it, and gives up in a crash loop.

It does not know the requests: it reports to the one listener that owns it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from worker.errors import CrashLoop, EngineCrashed, InsufficientVram, ModelError, WorkerError
from worker.observability.logs import get_logger
from worker.observability.metrics import Metrics
from worker.settings import Settings
from worker.supervisor.crash_history import LISTED_CRASHES, Crash, CrashHistory
from worker.supervisor.engine_process import EngineProcess
from worker.supervisor.spawn import ENGINE_ARGV, BegunEngine, begin_engine
from worker.wire.engine_info import EngineInfo
from worker.wire.messages import (
    Answered,
    Command,
    Event,
    Finished,
    LoadModel,
    Progress,
    Ready,
    StartFailed,
    Stop,
)

Condition = Literal["loading", "ready", "recovering", "failed"]


class EngineListener(Protocol):
    """The receiver of the guardian's reports."""

    def report(self, progress: Progress) -> None:
        """Report how far a start has come."""

    def on_ready(self) -> None:
        """An engine serves: the first one, or a replacement."""

    def on_events(self, events: list[Event]) -> None:
        """The engine sent one frame of events."""

    def on_lost(self, error: EngineCrashed, in_hand: frozenset[int]) -> None:
        """The engine that served is gone, and another may follow.

        `in_hand` has the ids of the requests that its threads were working on when it died.
        """

    def on_given_up(self, error: WorkerError) -> None:
        """No other engine follows."""

    def stalled_seconds(self) -> float:
        """How long the engine has had work without making progress."""


@dataclass(slots=True)
class Incarnation:
    """One engine process, from its spawn to its end."""

    spawned_at: float = field(default_factory=time.monotonic)
    last_frame_at: float = field(default_factory=time.monotonic)
    ready_at: float | None = None
    phase: str = "preflight"
    has_served: bool = False
    """Whether it has finished a request."""
    start_error: WorkerError | None = None
    kill_reason: str | None = None


class Guardian:
    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        listener: EngineListener,
        argv: Sequence[str] = ENGINE_ARGV,
        begun: BegunEngine | None = None,
    ) -> None:
        self.condition: Condition = "loading"
        self.info: EngineInfo | None = None
        """The info of the engine that serves, or of the last one that did."""
        self.resumed_at = 0.0
        """When this process last resumed after it had been suspended."""
        self.fatal: asyncio.Future[WorkerError] = asyncio.get_running_loop().create_future()
        """Set once, when the worker cannot serve any more and must leave with that error."""
        self._settings = settings
        self._metrics = metrics
        self._listener = listener
        self._argv = argv
        self._begun = begun
        self._log = get_logger()
        self.crashes: deque[Crash] = deque(maxlen=LISTED_CRASHES)
        """Newest last."""
        self._history = CrashHistory(settings.crash_limit, settings.crash_window)
        self._first_ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._engine: EngineProcess | None = None
        self._now = Incarnation()
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, command: Command) -> None:
        """Send a command; it is lost if there is no engine. Raises if it cannot be pickled."""
        if self._engine is not None:
            self._engine.send(command)

    def fail(self, error: WorkerError) -> None:
        """Make the worker leave with `error`, unless it already leaves with another."""
        self.condition = "failed"
        if not self.fatal.done():
            self.fatal.set_result(error)

    async def start(self, config: LoadModel) -> EngineInfo:
        """Spawn the first engine, and wait until it has decoded a token; raises if it cannot."""
        self.run(self._guard(config))
        self.run(self._watch())
        return await self._first_ready

    async def stop(self) -> None:
        """End the engine process in whatever state it is, and start no other."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.send(Stop())
            self._log.info("engine.stopped", how=await engine.end())

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that ends with the guardian; if it fails, the worker must leave."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("engine.guardian_failed", exc_info=error)
            self.fail(CrashLoop(f"The engine could not be looked after: {error}."))

    # --- spawn, replace, give up ---

    async def _guard(self, config: LoadModel) -> None:
        """Run one engine after the other, until the first start fails or the crashes are a loop."""
        while True:
            how = await self._one_engine(config)
            if not self._first_ready.done():
                self.condition = "failed"
                now = self._now
                error = now.start_error or start_failure(now.kill_reason or how, now.phase)
                self._first_ready.set_exception(error)
                return
            self._note_crash(how)
            if self._history.is_loop:
                crash_loop = CrashLoop(
                    f"The engine crashed {self._history.recent} times within "
                    f"{self._settings.crash_window:.0f} s, last: {how}; the limit is "
                    f"{self._settings.crash_limit}.",
                    crashes=self._history.recent,
                )
                self.fail(crash_loop)
                self._listener.on_given_up(crash_loop)
                return
            await asyncio.sleep(self._history.delay_seconds)

    async def _one_engine(self, config: LoadModel) -> str:
        """Spawn an engine and wait until it is gone; returns in words how it ended."""
        self._now = Incarnation()
        try:
            begun, self._begun = self._begun or begin_engine(self._argv), None
            engine = await EngineProcess.adopt(begun, self._on_frame)
        except OSError as trouble:  # memory or processes are short for now
            return f"not spawned: {trouble.strerror}"
        self._engine = engine
        engine.send(config)
        self._log.info("engine.spawned", pid=engine.pid)
        if self._first_ready.done():
            self._metrics.engine_respawned()
        await engine.lost.wait()
        if self._first_ready.done():
            self.condition = "recovering"
            self._listener.report(Progress("recovering", 0.0))
        if self._now.ready_at is not None:
            reason = self._now.kill_reason or "died"
            error = EngineCrashed(f"The engine process {reason}; try again.")
            self._listener.on_lost(error, engine.black_box.suspects)
        how = await engine.end()
        self._engine = None
        return how

    def _note_crash(self, how: str) -> None:
        now, at = self._now, time.monotonic()
        ready_seconds = 0.0 if now.ready_at is None else at - now.ready_at
        self._history.record(at, ready_seconds, served=now.has_served)
        trouble = now.start_error.message if now.start_error else None
        cause = trouble or now.kill_reason or how
        self.crashes.append(Crash(datetime.now(UTC), cause, ready_seconds))
        self._metrics.engine_crashed()
        self._log.error(
            "engine.crashed",
            how=how,
            reason=now.kill_reason,
            start_error=trouble,
            recent=self._history.recent,
            limit=self._settings.crash_limit,
            ready_seconds=round(ready_seconds, 3),
        )

    # --- watch ---

    def _on_frame(self, events: list[Event]) -> None:
        now = self._now
        now.last_frame_at = time.monotonic()
        if now.ready_at is None:
            self._follow_start(events)
        elif not now.has_served:
            now.has_served = any(isinstance(event, Finished | Answered) for event in events)
        self._listener.on_events(events)

    def _follow_start(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Progress():
                    self._now.phase = event.phase
                    self._listener.report(event)
                case StartFailed():
                    self._now.start_error = event.error
                case Ready():
                    self._on_ready(event.info)

    def _on_ready(self, info: EngineInfo) -> None:
        self.info = info
        self.condition = "ready"
        self._now.ready_at = time.monotonic()
        seconds = self._now.ready_at - self._now.spawned_at
        self._metrics.engine_loaded(seconds)
        self._log.info("engine.ready", pid=info.pid, seconds=round(seconds, 3))
        self._listener.on_ready()
        if not self._first_ready.done():
            self._first_ready.set_result(info)

    async def _watch(self) -> None:
        """Kill an engine that makes no progress; `_guard` then replaces it."""
        timeout = self._settings.stall_timeout
        # The kill follows "unhealthy" after a while, so that probes can see that state.
        patience = timeout + max(1.0, timeout / 10)
        # Compiling kernels or reading from a slow disk may take long without a report.
        start_patience = max(10 * timeout, 120.0)
        tick = min(1.0, timeout / 4)
        while True:
            before = time.monotonic()
            await asyncio.sleep(tick)
            now = self._now
            if time.monotonic() - before > tick + 1.0:
                # This process itself was suspended; the pipe may hold frames that it has not read.
                self.resumed_at = now.last_frame_at = time.monotonic()
            elif now.ready_at is None:
                if time.monotonic() - now.last_frame_at > start_patience:
                    self._kill(f"was silent for {start_patience:.0f} s of its start and was killed")
            elif self._listener.stalled_seconds() >= patience:
                self._kill(f"made no progress for {patience:.1f} s and was killed")

    def _kill(self, reason: str) -> None:
        if self._engine is not None and self._now.kill_reason is None:
            self._now.kill_reason = reason
            self._log.error("engine.stalled", pid=self._engine.pid, reason=reason)
            self._engine.kill()


def start_failure(how: str, phase: str) -> WorkerError:
    """The error for a first engine that died without a report."""
    if how == "killed by SIGKILL":
        return InsufficientVram(
            f"The engine process was killed in phase {phase!r}, most likely by the kernel for "
            "lack of memory; choose a smaller model, a shorter context or fewer slots.",
            phase=phase,
        )
    return ModelError(f"The engine process ended in phase {phase!r}: {how}.", phase=phase)
