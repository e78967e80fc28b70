"""`/status`: what the worker does now, for its page and for people; and the last hour of it.

Counts, times and reasons, never a text. Everything is read from the supervisor's `WorkerStatus` and
from the counters of `/metrics`.
"""

from __future__ import annotations

import time
from typing import get_args

from starlette.requests import Request
from starlette.responses import Response

from worker.api.dialects.native.answers import History, MemoryPart, Status
from worker.api.http.encoding import json_response
from worker.api.http.operation import JSON, Operation
from worker.api.http.state import AppState
from worker.supervisor.status import WorkerStatus
from worker.wire.messages import CacheTier

MOST_WAITING = 32
"""Waiting requests that are listed; `queued` counts all."""


async def status(request: Request, state: AppState) -> Response:
    now = state.supervisor.status()
    body: Status = {
        "at": time.time(),
        "state": now.state,
        "phase": now.progress.phase,
        "percent": now.progress.percent,
        "bytes_per_second": now.progress.bytes_per_second,
        "uptime_seconds": now.uptime_seconds,
        "slots": now.info.slots if now.info is not None else state.settings.engine.slots,
        "running": now.running,
        "queued": now.queued,
        "queued_prompt_tokens": now.queued_prompt_tokens,
        "requests": state.supervisor.activities(MOST_WAITING),
        "kv_cells": {
            "used": now.stats.kv_cells_used - now.stats.kv_cells_cached,
            "cached": now.stats.kv_cells_cached,
            "total": now.stats.kv_cells_total,
        },
        "memory": _memory(now),
        "device_bytes": now.info.device_total_bytes if now.info is not None else 0,
        "prompt_tokens": _prompt_tokens(state),
        "tokens_out": state.metrics.value("worker_tokens_generated_total"),
        "engine_crashes": state.metrics.value("worker_engine_crashes_total"),
        "refusals": [*reversed(state.refusals)],
    }
    return json_response(body)


def _memory(now: WorkerStatus) -> list[MemoryPart]:
    """The planned bytes on the device, part by part; the cells' are split by what they hold. A
    worker without an engine takes none."""
    if now.info is None or now.state == "sleeping":
        return []
    parts: list[MemoryPart] = []
    stats = now.stats
    for part, n_bytes in now.info.plan.items():
        if part != "kv" or not stats.kv_cells_total:
            parts.append({"part": part, "bytes": n_bytes})
            continue
        each = n_bytes / stats.kv_cells_total
        used = round(each * (stats.kv_cells_used - stats.kv_cells_cached))
        cached = round(each * stats.kv_cells_cached)
        parts.append({"part": "kv_used", "bytes": used})
        parts.append({"part": "kv_cached", "bytes": cached})
        parts.append({"part": "kv_free", "bytes": n_bytes - used - cached})
    return parts


def _prompt_tokens(state: AppState) -> dict[str, float]:
    """Of all started prompts: what was found in each tier, and what was computed."""
    value = state.metrics.value
    found = {tier: value("worker_tokens_reused_total", tier=tier) for tier in get_args(CacheTier)}
    return found | {"computed": value("vllm:prefix_cache_queries_total") - sum(found.values())}


async def history(request: Request, state: AppState) -> Response:
    return json_response(state.history.columns(History.__annotations__))


OPERATIONS = [
    Operation(
        "GET", "/status", status, "What the worker does now", {JSON: Status}, quiet=True
    ),
    Operation(
        "GET", "/status/history", history, "The last hour", {JSON: History}, quiet=True
    ),
]  # fmt: skip
