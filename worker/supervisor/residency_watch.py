"""Asks the engine periodically whether the model is still where it was placed.

A task on the event loop of the API process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from worker.errors import ResidencyViolation, WorkerError
from worker.observability.logs import get_logger
from worker.wire.work import ProveResidency, Work

INTERVAL_SECONDS = 15.0

_log = get_logger()


async def first_violation(ask: Callable[[Work], Awaitable[Any]]) -> ResidencyViolation:
    """Wait for the first residency proof that fails; returns its error."""
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        try:
            await ask(ProveResidency())
        except ResidencyViolation as error:
            _log.error("residency.lost", message=error.message, **error.details)
            return error
        except WorkerError as error:  # not ready, or just crashed: ask again later
            _log.debug("residency.unasked", reason=error.message)
