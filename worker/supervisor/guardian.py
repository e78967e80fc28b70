"""Keeps an engine process alive: spawns it, watches it, replaces it, and gives up in a crash loop.

It does not know the requests: it reports to the supervisor that owns it. Runs on the API process's
event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Literal

from worker.errors import CrashLoop, EngineCrashed, InsufficientVram, ModelError, WorkerError
from worker.observability.logs import get_logger
from worker.observability.metrics import Metrics
from worker.settings import Settings
from worker.supervisor.crash_history import Crash, CrashHistory
from worker.supervisor.engine_process import EngineProcess
from worker.supervisor.judge_clock import JudgeClock
from worker.wire.codec import check_sendable
from worker.wire.engine_info import EngineInfo
from worker.wire.messages import EngineFailed, LoadModel, Progress, Ready, Stop

if TYPE_CHECKING:
    from worker.supervisor.supervisor import Supervisor

Condition = Literal["loading", "ready", "sleeping", "recovering", "failed"]

_LEAVING_SECONDS = 5.0
"""How long an engine that falls asleep may take to exit before it is killed."""
_log = get_logger()


class Guardian:
    def __init__(
        self, settings: Settings, metrics: Metrics, supervisor: Supervisor, engine: EngineProcess
    ) -> None:
        self.engine = engine
        """The current engine, or the last one while there is none."""
        self.fatal: asyncio.Future[WorkerError] = asyncio.get_running_loop().create_future()
        """Set once, when the worker can no longer serve and must exit with that error."""
        self.clock = JudgeClock(_tick_seconds(settings.stall_timeout))
        self.crashes = CrashHistory(settings.crash_limit, settings.crash_window)
        self._settings = settings
        self._metrics = metrics
        self._supervisor = supervisor
        self._woken: asyncio.Event | None = None
        """Set when a sleeping worker is to start an engine again; `None` while it is awake."""
        self._first_ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def condition(self) -> Condition:
        if self.fatal.done():
            return "failed"
        if self._woken is not None:
            return "sleeping"
        engine = self.engine
        if engine.ready_at is not None and not engine.lost.is_set():
            return "ready"
        return "loading" if self._supervisor.info is None else "recovering"

    @property
    def wakes(self) -> bool:
        """Whether a sleeping worker is starting an engine that is not ready yet."""
        return self._woken is not None and self._woken.is_set()

    def sleep(self) -> None:
        """End the engine process, which frees all its memory, until `wake`."""
        self._woken = asyncio.Event()
        self.engine.send(Stop())
        asyncio.get_running_loop().call_later(_LEAVING_SECONDS, self.engine.kill)
        _log.info("engine.sleeps", pid=self.engine.pid)

    def wake(self) -> None:
        """Start an engine if the worker sleeps; it is awake once that engine is ready."""
        if self._woken is not None:
            self._woken.set()

    def fail(self, error: WorkerError) -> None:
        """Make the worker exit with `error`, unless it is exiting with another already."""
        if not self.fatal.done():
            self.fatal.set_result(error)

    async def start(self, config: LoadModel) -> EngineInfo:
        """Spawn the first engine, and wait until it has decoded a token; raises if it cannot."""
        check_sendable(config)
        self.run(self._guard(config))
        self.run(self._watch())
        return await self._first_ready

    async def stop(self) -> None:
        """End the engine process, whatever its state, and start no other."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks and self.engine.pid is not None:
            self.engine.send(Stop())
            _log.info("engine.stopped", how=await self.engine.end())

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that is cancelled with the guardian; the worker exits if it fails."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("engine.guardian_failed", exc_info=error)
            self.fail(CrashLoop(f"The engine could not be supervised: {error}."))

    # --- spawn, replace, give up ---

    async def _guard(self, config: LoadModel) -> None:
        """Run one engine after another, until the first start fails or there is a crash loop."""
        while True:
            how = await self._one_engine(config)
            if self._supervisor.info is None:
                error = self.engine.error or start_failure(self.engine, how)
                self.fail(error)
                if not self._first_ready.done():  # it is cancelled if `start` was
                    self._first_ready.set_exception(error)
                return
            if self._woken is not None:
                await self._woken.wait()
                self.engine = self.engine.successor()
                continue
            cause = self._record_crash(how)
            if self.crashes.is_loop:
                recent = self.crashes.recent
                crash_loop = CrashLoop(
                    f"The engine crashed {recent} times within {self._settings.crash_window:.0f} "
                    f"s, last: {cause.rstrip('.')}; the limit is {self._settings.crash_limit}.",
                    crashes=recent,
                )
                self.fail(crash_loop)
                self._supervisor.on_given_up(EngineCrashed(crash_loop.message))
                return
            await asyncio.sleep(self.crashes.delay_seconds)
            self.engine = self.engine.successor()

    async def _one_engine(self, config: LoadModel) -> str:
        """Spawn an engine and wait until it is gone; returns how it ended, in words."""
        engine = self.engine
        engine.heard_at = self.clock.now()
        try:
            engine.spawn()
            await engine.connect(self._supervisor.on_events)
        except WorkerError as trouble:
            engine.error = trouble
        else:
            engine.send(config)
            _log.info("engine.spawned", pid=engine.pid)
            if self._supervisor.info is not None and self._woken is None:
                self._metrics.respawns.inc()
            await engine.lost.wait()
        if engine.ready_at is None:
            self._woken = None  # it failed to wake the worker, which counts as a crash
        if self._supervisor.info is not None:
            phase = "recovering" if self._woken is None else "sleeping"
            self._supervisor.set_progress(Progress(phase, 0.0))
        if engine.ready_at is not None:
            error = EngineCrashed(f"The engine process {engine.kill_reason or 'died'}; try again.")
            self._supervisor.on_lost(error, engine.suspects)
        return await engine.end()

    def _record_crash(self, how: str) -> str:
        """Record that the engine crashed; returns the cause, in words."""
        engine = self.engine
        reported = engine.error.message if engine.error else None
        cause = reported or engine.kill_reason or how
        crash = Crash(cause, engine.ready_seconds, engine.has_answered)
        self.crashes.record(crash)
        self._metrics.crashes.inc()
        _log.error(
            "engine.crashed",
            how=how,
            reason=engine.kill_reason,
            error=reported,
            recent=self.crashes.recent,
            limit=self._settings.crash_limit,
            ready_seconds=round(crash.ready_seconds, 3),
        )
        return cause

    # --- watch ---

    def follow(self, event: Progress | EngineFailed | Ready) -> None:
        """Handle an engine's report about its start or its end."""
        engine = self.engine
        match event:
            case EngineFailed():
                engine.error = event.error
            case _ if engine.ready_at is not None:
                return
            case Progress():
                engine.heard_at = self.clock.now()
                engine.phase = event.phase
                self._supervisor.set_progress(event)
            case Ready(info=info):
                engine.ready_at = time.monotonic()
                self._woken = None
                seconds = engine.ready_at - engine.connected_at
                self._metrics.load.observe(seconds)
                _log.info("engine.ready", pid=info.pid, seconds=round(seconds, 3))
                self._supervisor.on_ready(info)
                if not self._first_ready.done():
                    self._first_ready.set_result(info)

    async def _watch(self) -> None:
        """Kill an engine that makes no progress; `_guard` then replaces it."""
        timeout = self._settings.stall_timeout
        # The kill follows "unhealthy" after a while, so that probes can see that state.
        patience = timeout + max(1.0, timeout / 10)
        # Compiling kernels or reading from a slow disk can take long without a report.
        start_patience = max(10 * timeout, 120.0)
        pulses: tuple[int, ...] = ()
        while True:
            await asyncio.sleep(_tick_seconds(timeout))
            self.clock.tick()
            engine, before = self.engine, pulses
            if (pulses := engine.pulses) != before:
                self._supervisor.on_pulse()
            if engine.ready_at is None:
                if self.clock.now() - engine.heard_at > start_patience:
                    self._kill(f"was silent for {start_patience:.0f} s at start and was killed")
            elif self._supervisor.stalled_seconds() >= patience:
                self._kill(f"made no progress for {patience:.1f} s and was killed")

    def _kill(self, reason: str) -> None:
        if self.engine.pid is not None and self.engine.kill_reason is None:
            self.engine.kill_reason = reason
            _log.error("engine.stalled", pid=self.engine.pid, reason=reason)
            self.engine.kill()


def _tick_seconds(stall_timeout: float) -> float:
    """Interval between two checks of the engine."""
    return min(1.0, stall_timeout / 4)


def start_failure(engine: EngineProcess, how: str) -> WorkerError:
    """The error for a first engine that died without reporting one."""
    how, phase = engine.kill_reason or how, engine.phase
    if how.startswith("killed by SIGKILL"):
        return InsufficientVram(
            f"The engine process was killed in phase {phase!r}, most likely by the kernel for "
            "lack of memory; choose a smaller model, a shorter context or fewer slots.",
            phase=phase,
        )
    # It exits without a report if the system refuses something to a library, such as a thread.
    kind = WorkerError if how.startswith("exit code") else ModelError
    return kind(f"The engine process ended in phase {phase!r}: {how}.", phase=phase)
