"""Heartbeats: the worker's whole state, repeated, so that the loss of a message does no harm.

A task on the API process's event loop, which the engine cannot block. A beat is sent at once when
the state changes (except between `ready` and `busy`), else every `--heartbeat-interval`. The beat
that says `draining` or `failed` is the last one, and is sent again until it is accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from worker.observability.logs import get_logger
from worker.observability.metrics import Metrics
from worker.pool.client import ATTEMPT_SECONDS, PoolClient
from worker.pool.rules import FINAL_STATUSES

LAST_BEAT_SECONDS = 2.0
"""How long the exit may wait for the last heartbeat to be accepted."""
_LAST_BEAT_RETRY_SECONDS = 0.5
_log = get_logger()

Beat = Mapping[str, Any]
"""Everything that a manager needs to know; it does not have to remember earlier beats."""


@dataclass
class Heartbeats:
    """Sends beats to one URL until the last one was accepted."""

    client: PoolClient
    metrics: Metrics
    url: str
    interval_seconds: float
    compose: Callable[[], Beat]
    """Makes a beat from the current state."""
    changed: Callable[[], asyncio.Event]
    """Returns an event that is set at the next change of the state."""

    def __post_init__(self) -> None:
        self._trouble = ""
        self._task = asyncio.create_task(self._run())

    async def end(self, *, now: bool) -> None:
        """Stop once the last beat is accepted, after `LAST_BEAT_SECONDS` or `now` at the latest."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._task, 0 if now else LAST_BEAT_SECONDS)

    async def _run(self) -> None:
        for sequence in count(1):
            beat = {**self.compose(), "sequence": sequence}
            sent_at = time.monotonic()
            accepted = await self._send_unless_outdated(beat)
            if _is_final(beat) and accepted:
                return
            is_urgent = _is_final(self.compose())
            pause = _LAST_BEAT_RETRY_SECONDS if is_urgent else self.interval_seconds
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(sent_at + pause - time.monotonic()):
                    await self._until(partial(_is_news, last=beat))

    async def _until(self, holds: Callable[[Beat], bool]) -> None:
        """Wait until the state satisfies `holds`."""
        while True:
            changed = self.changed()
            if holds(self.compose()):
                return
            await changed.wait()

    async def _send_unless_outdated(self, beat: Beat) -> bool:
        """Send the beat; returns whether it was accepted. A pending one is abandoned when the last
        beat is due."""
        sending = asyncio.create_task(self._send(beat))
        last_is_due = asyncio.create_task(
            self._until(lambda now: _is_final(now) and not _is_final(beat))
        )
        try:
            await asyncio.wait({sending, last_is_due}, return_when=asyncio.FIRST_COMPLETED)
            return sending.done() and sending.result()
        finally:
            sending.cancel()
            last_is_due.cancel()

    async def _send(self, beat: Beat) -> bool:
        _, trouble = await self.client.post(
            self.url, beat, min(ATTEMPT_SECONDS, max(1.0, self.interval_seconds))
        )
        accepted = not trouble
        self.metrics.heartbeats.labels("sent" if accepted else "failed").inc()
        if trouble and trouble != self._trouble:
            _log.warning("heartbeat.failed", reason=trouble)
        elif self._trouble and not trouble:
            _log.info("heartbeat.recovered", sequence=beat["sequence"])
        self._trouble = trouble
        return accepted


def _is_final(beat: Beat) -> bool:
    return beat["status"] in FINAL_STATUSES


def _is_news(now: Beat, last: Beat) -> bool:
    """Whether a manager should learn of the change at once. `ready` and `busy` are one state."""
    return bool(now["state"] != last["state"])
