"""Heartbeats: the worker's whole state, repeated, so that no single message matters.

A task on the API process's event loop, which the engine cannot block. A beat is sent at once when
the state changes (except between `ready` and `busy`), else every `--heartbeat-interval`. The beat
that says `draining` or `failed` is the last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from worker.observability.logs import get_logger
from worker.observability.metrics import Metrics
from worker.pool.client import ATTEMPT_SECONDS, PoolClient
from worker.pool.rules import FINAL_STATUSES

_LAST_BEAT_RETRY_SECONDS = 0.5
_log = get_logger()


@dataclass(frozen=True, slots=True)
class Beat:
    """Everything that a manager needs; it need not remember earlier beats."""

    worker_id: str
    incarnation: str
    sequence: int
    status: str
    """`loading`, `ready`, `busy`, `draining` or `failed`: what a manager acts on."""
    state: str
    """The worker's own state, which distinguishes `recovering` from `loading`."""
    phase: str
    percent: float
    uri: str
    model_ref: str
    backend: str
    device: str | None
    capabilities: list[str]
    protocol: str
    version: str
    slots: int
    context_length: int | None
    running: int
    queued: int
    queued_prompt_tokens: int
    kv_cells_used: int
    kv_cells_total: int
    resident: bool
    residency_lost: str | None
    vram_bytes: int
    last_progress_ms: float
    uptime_seconds: float
    interval_seconds: float


@dataclass(slots=True)
class Heartbeats:
    """`run` sends beats until its last one was accepted. `compose` makes a beat from its number."""

    _client: PoolClient
    _metrics: Metrics
    _url: str
    _interval_seconds: float
    _compose: Callable[[int], Beat]
    _changed: Callable[[], asyncio.Event]
    """Returns an event that is set at the next change of the worker's state."""
    _sequence: int = 0
    _failing: bool = False

    async def run(self) -> None:
        while True:
            changed = self._changed()
            self._sequence += 1
            beat = self._compose(self._sequence)
            sent_at = time.monotonic()
            taken = await self._send_unless_outdated(beat)
            if beat.status in FINAL_STATUSES and taken:
                return
            urgent = self._compose(0).status in FINAL_STATUSES
            pause = _LAST_BEAT_RETRY_SECONDS if urgent else self._interval_seconds
            await self._sleep_until_news(beat, changed, sent_at + pause)

    async def _send_unless_outdated(self, beat: Beat) -> bool:
        """Send the beat; one that hangs is given up as soon as the last beat is due."""
        sending = asyncio.create_task(self._send(beat))
        try:
            while True:
                news = asyncio.create_task(self._changed().wait())
                try:
                    await asyncio.wait({sending, news}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
                if sending.done():
                    return sending.result()
                if beat.status not in FINAL_STATUSES and (
                    self._compose(0).status in FINAL_STATUSES
                ):
                    return False
        finally:
            sending.cancel()

    async def _send(self, beat: Beat) -> bool:
        status, trouble = await self._client.post(
            self._url, asdict(beat), min(ATTEMPT_SECONDS, max(1.0, self._interval_seconds))
        )
        taken = status is not None and 200 <= status < 300
        self._metrics.heartbeat(taken)
        if not taken and not self._failing:
            _log.warning("heartbeat.failed", reason=trouble or f"it answered {status}")
        elif taken and self._failing:
            _log.info("heartbeat.recovered", sequence=beat.sequence)
        self._failing = not taken
        return taken

    async def _sleep_until_news(self, last: Beat, changed: asyncio.Event, due_at: float) -> None:
        """Sleep until `due_at`, or until the state differs from the last beat's."""
        while (remaining := due_at - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(changed.wait(), remaining)
            except TimeoutError:
                return
            changed = self._changed()
            now = self._compose(0)
            busy_or_ready = {now.status, last.status} <= {"ready", "busy"}
            if now.state != last.state or (now.status != last.status and not busy_or_ready):
                return
