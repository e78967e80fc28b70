"""Composes `LoadModel`: the model, its adapters, draft model and projector, resolved to files.

Runs on the API process's event loop, and in commands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from worker.models.adapter import resolve_adapters
from worker.models.draft import resolve_draft
from worker.models.gguf.header import packed
from worker.models.projector import resolve_projector
from worker.models.resolve import ResolvedModel
from worker.settings import Settings
from worker.wire.messages import LoadModel, OnProgress


async def load_command(
    settings: Settings,
    model: ResolvedModel,
    on_progress: OnProgress = lambda progress: None,
    room: Callable[[], int] | None = None,
) -> LoadModel:
    """The first command for an engine; `room` returns the bytes of memory, as for `resolve`.

    Raises what `resolve_adapters`, `resolve_draft` and `resolve_projector` raise.
    """
    header, cache = model.header, settings.cache_path
    return LoadModel(
        engine=settings.engine,
        model_path=str(model.gguf_path),
        model_ref=model.model_ref,
        header=packed(model.header),
        worker_id=settings.worker_id,
        log_level=settings.log_level,
        log_format=settings.log_format,
        adapters=await resolve_adapters(settings.adapters, header, cache, on_progress),
        draft=await resolve_draft(settings, header, on_progress, room),
        projector=await asyncio.to_thread(resolve_projector, settings, model),
        driver_cache=str(cache / "drivers"),
    )
