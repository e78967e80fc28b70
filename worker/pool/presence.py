"""The worker's part in its pool, on the event loop: a ready callback once, heartbeats always."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from worker.observability.metrics import Metrics
from worker.pool.client import PoolClient, ReadyCallback
from worker.pool.heartbeat import Beat, Heartbeats
from worker.settings import Settings

LAST_BEAT_SECONDS = 2.0
"""How long the exit may wait for the last heartbeat to be accepted."""


class Presence:
    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._client = PoolClient(settings, metrics)
        self._beating: asyncio.Task[None] | None = None

    def begin(self, compose: Callable[[int], Beat], changed: Callable[[], asyncio.Event]) -> None:
        """Start heartbeats if the pool wants any; for the arguments, see `Heartbeats`."""
        url, interval = self._settings.heartbeat_url, self._settings.heartbeat_interval
        if url is not None:
            beats = Heartbeats(self._client, self._metrics, url, interval, compose, changed)
            self._beating = asyncio.create_task(beats.run())

    async def announce(self, ready: ReadyCallback) -> None:
        """Send the ready callback; raises `CallbackFailed`."""
        await self._client.announce(ready)

    async def end(self, *, now: bool) -> None:
        """Give the last beat a moment to be accepted, then close the connections."""
        if self._beating is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._beating, 0 if now else LAST_BEAT_SECONDS)
        await self._client.close()
