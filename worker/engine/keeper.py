"""Keeps one engine process alive: spawns it, notices its death or stall, and replaces it.

Lives on the event loop of the API process. Knows nothing of requests: the supervisor is told by
callbacks when frames come, when an engine is lost and when no other will follow.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from worker.engine.child import ENGINE_ARGV, EngineProcess
from worker.engine.recovery import CrashHistory
from worker.errors import (
    CrashLoop,
    EngineCrashed,
    InsufficientVram,
    ModelError,
    WorkerError,
)
from worker.messages import Command, EngineConfig, EngineInfo, Event, Progress, Stop
from worker.observability.logs import get_logger
from worker.observability.metrics import Metrics
from worker.settings import Settings

Condition = Literal["loading", "ready", "recovering", "failed"]


@dataclass(frozen=True, slots=True)
class Callbacks:
    on_frame: Callable[[list[Event]], None]
    on_ready: Callable[[], None]
    """A replacement (or the first engine) serves."""
    on_lost: Callable[[WorkerError], None]
    """The engine is gone; what it had in flight is lost. Another may follow."""
    on_given_up: Callable[[WorkerError], None]
    """No other engine follows."""
    on_progress: Callable[[Progress], None]
    is_stalled: Callable[[float], bool]
    """Whether there is work and has been no frame for so many seconds."""
    is_draining: Callable[[], bool]


class EngineKeeper:
    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        callbacks: Callbacks,
        argv: Sequence[str] = ENGINE_ARGV,
    ) -> None:
        self.condition: Condition = "loading"
        self.info: EngineInfo | None = None
        self.resumed_at = 0.0
        """When this process last went on after it had stood still itself."""
        self.fatal: asyncio.Future[WorkerError] = asyncio.get_running_loop().create_future()
        """Set once, when the worker can serve no longer and has to leave with that error."""
        self._settings = settings
        self._metrics = metrics
        self._callbacks = callbacks
        self._argv = argv
        self._log = get_logger()
        self._crashes = CrashHistory(settings.crash_limit, settings.crash_window)
        self._config: EngineConfig | None = None
        self._engine: EngineProcess | None = None
        self._first_ready: asyncio.Future[EngineInfo] | None = None
        self._spawned_at = self._last_frame_at = 0.0
        self._ready_at: float | None = None
        self.has_served = False
        """Whether this engine has finished a request; set by the supervisor."""
        self._start_error: WorkerError | None = None
        self._kill_reason: str | None = None
        self._stopping = False
        self._phase = "preflight"
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        return self._engine.pid if self._engine is not None else None

    def send(self, command: Command) -> None:
        if self._engine is not None:
            self._engine.send(command)

    def fail(self, error: WorkerError) -> None:
        """The worker has to leave: remember why, once."""
        self.condition = "failed"
        if not self.fatal.done():
            self.fatal.set_result(error)

    async def start(self, config: EngineConfig) -> EngineInfo:
        """Spawn the first engine, wait until it has decoded a token; raises why it could not."""
        self._config = config
        self._first_ready = asyncio.get_running_loop().create_future()
        await self._spawn()
        self.run(self._watch())
        return await self._first_ready

    async def stop(self) -> None:
        """End the engine process, whatever state it is in; no other follows."""
        self._stopping = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.send(Stop())
            self._log.info("engine.stopped", how=await engine.end())

    # --- told by the supervisor, which reads the frames ---

    def started(self, info: EngineInfo) -> None:
        self.info = info
        self.condition = "ready"
        self._ready_at = time.monotonic()
        seconds = self._ready_at - self._spawned_at
        self._metrics.engine_loaded(seconds)
        self._log.info("engine.ready", pid=info.pid, seconds=round(seconds, 3))
        self._callbacks.on_ready()
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_result(info)

    def start_failed(self, error: WorkerError) -> None:
        self._start_error = error

    def progressed(self, progress: Progress) -> None:
        self._phase = progress.phase
        self._callbacks.on_progress(progress)

    # --- one incarnation ---

    async def _spawn(self) -> None:
        assert self._config is not None
        self._spawned_at = self._last_frame_at = time.monotonic()
        self._ready_at = self._start_error = self._kill_reason = None
        self.has_served = False
        current: list[EngineProcess] = []  # frames of an engine that was replaced are dropped

        def on_frame(events: list[Event]) -> None:
            if current and current[0] is self._engine:
                self._last_frame_at = time.monotonic()
                self._callbacks.on_frame(events)

        def on_lost() -> None:
            if current and current[0] is self._engine:
                self._engine = None
                self._on_lost(current[0])

        engine = await EngineProcess.spawn(on_frame, on_lost, self._argv)
        current.append(engine)
        self._engine = engine
        engine.send(self._config)
        self._log.info("engine.spawned", pid=engine.pid)

    def _on_lost(self, engine: EngineProcess) -> None:
        if self._stopping:
            self.run(self._reap(engine))
            return
        starting = self._first_ready is not None and not self._first_ready.done()
        if not starting:
            self.condition = "recovering"
            self._callbacks.on_progress(Progress("recovering", 0.0))
        reason = self._kill_reason or "died"
        self._callbacks.on_lost(EngineCrashed(f"The engine process {reason}; try again."))
        self.run(self._fail_start(engine) if starting else self._recover(engine))

    async def _reap(self, engine: EngineProcess) -> None:
        self._log.info("engine.stopped", how=await engine.end())

    async def _fail_start(self, engine: EngineProcess) -> None:
        how = await engine.end()
        error = self._start_error or start_failure(self._kill_reason or how, self._phase)
        self.condition = "failed"
        assert self._first_ready is not None
        if not self._first_ready.done():
            self._first_ready.set_exception(error)

    async def _recover(self, engine: EngineProcess) -> None:
        """Replace a dead engine: at once the first time, slower and slower in a series."""
        how = await engine.end()
        while True:
            self._note_crash(how)
            if self._crashes.is_loop:
                error = CrashLoop(
                    f"The engine crashed {self._crashes.recent} times within "
                    f"{self._settings.crash_window:.0f} s, last: {how}; the limit is "
                    f"{self._settings.crash_limit}.",
                    crashes=self._crashes.recent,
                )
                self.fail(error)
                self._callbacks.on_given_up(error)
                return
            if self._callbacks.is_draining():
                self._callbacks.on_given_up(EngineCrashed("The engine died during the stop."))
                return
            await asyncio.sleep(self._crashes.delay_seconds)
            try:
                await self._spawn()
            except OSError as error:  # no memory or no process to be had, for now
                how = f"not spawned: {error.strerror}"
            else:
                self._metrics.engine_respawned()
                return

    def _note_crash(self, how: str) -> None:
        now = time.monotonic()
        ready_seconds = 0.0 if self._ready_at is None else now - self._ready_at
        self._crashes.record(now, ready_seconds, served=self.has_served)
        self._metrics.engine_crashed()
        self._log.error(
            "engine.crashed",
            how=how,
            reason=self._kill_reason,
            start_error=self._start_error.message if self._start_error else None,
            recent=self._crashes.recent,
            limit=self._settings.crash_limit,
            ready_seconds=round(ready_seconds, 3),
        )

    # --- the watch ---

    async def _watch(self) -> None:
        """Kill an engine that makes no progress; its end then takes the path of a crash."""
        timeout = self._settings.stall_timeout
        # Some time passes between "unhealthy" and the kill, for whoever probes to see it.
        patience = timeout + max(1.0, timeout / 10)
        # Compiling kernels or reading from a slow disk may be silent for long.
        start_patience = max(10 * timeout, 120.0)
        tick = min(1.0, timeout / 4)
        while True:
            before = time.monotonic()
            await asyncio.sleep(tick)
            if time.monotonic() - before > tick + 1.0:
                # It was this process that stood still; frames may lie unread in the pipe.
                self.resumed_at = self._last_frame_at = time.monotonic()
            elif self.condition == "ready" and self._callbacks.is_stalled(patience):
                self._kill(f"made no progress for {patience:.1f} s and was killed")
            elif self._engine is not None and self._ready_at is None:
                if time.monotonic() - self._last_frame_at > start_patience:
                    self._kill(f"was silent for {start_patience:.0f} s of its start and was killed")

    def _kill(self, reason: str) -> None:
        if self._engine is not None and self._kill_reason is None:
            self._kill_reason = reason
            self._log.error("engine.stalled", pid=self._engine.pid, reason=reason)
            self._engine.kill()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that ends with the keeper; if it fails, the worker cannot go on."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("engine.keeper_failed", exc_info=error)
            self.fail(CrashLoop(f"The engine could not be looked after: {error}."))


def start_failure(how: str, phase: str) -> WorkerError:
    """What the death of the first engine says, when it could not say anything itself."""
    if how == "killed by SIGKILL":
        return InsufficientVram(
            f"The engine process was killed in phase {phase!r}, most likely by the kernel for "
            "lack of memory; choose a smaller model, a shorter context or fewer slots.",
            phase=phase,
        )
    return ModelError(f"The engine process ended in phase {phase!r}: {how}.", phase=phase)
