"""What this worker tells its pool about itself, drawn from what the supervisor holds.

The rooms `pool` (how it is sent) and `engine` (what is true) do not know each other; this joins
them for `lifecycle`. Runs on the API process's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from worker.api.state import AppState
from worker.messages import EngineInfo
from worker.pool.client import PoolClient, ReadyCallback
from worker.pool.heartbeat import Beat, Heartbeats

LAST_BEAT_SECONDS = 2.0
"""For the last heartbeat to be taken, once nothing else keeps the worker."""


class Presence:
    def __init__(self, state: AppState, uri: str, version: str) -> None:
        self._state = state
        self._uri = uri
        self._version = version
        self._client = PoolClient(state.settings, state.metrics)
        self._beating: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Heartbeats from now on, if the pool wants any."""
        settings = self._state.settings
        if settings.heartbeat_url is not None:
            heartbeats = Heartbeats(
                self._client,
                self._state.metrics,
                settings.heartbeat_url,
                settings.heartbeat_interval,
                self.beat,
                lambda: self._state.supervisor.changed,
            )
            self._beating = asyncio.create_task(heartbeats.run())

    async def announce(self, info: EngineInfo) -> None:
        """The ready callback; raises `CallbackFailed`."""
        state = self._state
        await self._client.announce(
            ReadyCallback(
                worker_id=state.worker_id,
                model_ref=state.model_ref,
                vram_bytes=info.residency.device_bytes,
                uri=self._uri,
                backend=state.settings.backend,
                device=info.device,
                capabilities=capabilities(info),
                slots=info.slots,
                context_length=info.model.context_length,
                incarnation=state.incarnation,
                version=self._version,
            )
        )

    async def end(self, *, now: bool) -> None:
        """Give the last beat a moment to be taken, then let go."""
        if self._beating is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._beating, 0 if now else LAST_BEAT_SECONDS)
        await self._client.close()

    def beat(self, sequence: int) -> Beat:
        """The whole state, now."""
        state, supervisor = self._state, self._state.supervisor
        info, stats = supervisor.info, supervisor.stats
        return Beat(
            worker_id=state.worker_id,
            incarnation=state.incarnation,
            sequence=sequence,
            status=self._status(),
            state=supervisor.state,
            phase=supervisor.progress.phase,
            percent=supervisor.progress.percent,
            uri=self._uri,
            model_ref=state.model_ref,
            backend=state.settings.backend,
            device=info.device if info else None,
            capabilities=capabilities(info) if info else [],
            protocol="sse",
            version=self._version,
            slots=info.slots if info else state.settings.slots,
            context_length=info.model.context_length if info else state.settings.context_length,
            running=supervisor.running,
            queued=supervisor.queued,
            queued_prompt_tokens=supervisor.queued_prompt_tokens,
            kv_cells_used=stats.kv_cells_used if stats else 0,
            kv_cells_total=stats.kv_cells_total if stats else 0,
            resident=info is not None
            and info.residency.resident
            and supervisor.residency_lost is None,
            residency_lost=supervisor.residency_lost,
            vram_bytes=info.residency.device_bytes if info else 0,
            last_progress_ms=round(supervisor.last_progress_ms, 1),
            uptime_seconds=round(time.monotonic() - state.started_at, 3),
            interval_seconds=state.settings.heartbeat_interval,
        )

    def _status(self) -> str:
        supervisor = self._state.supervisor
        match supervisor.state:
            case "failed" | "draining" as final:
                return final
            case "ready" if supervisor.residency_lost is None:
                return "busy" if supervisor.running + supervisor.queued else "ready"
            case _:
                return "loading"


def capabilities(info: EngineInfo) -> list[str]:
    return ["embeddings"] if info.model.pooling else ["text-gen"]
