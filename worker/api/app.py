"""The worker's HTTP API, assembled from its dialects."""

from __future__ import annotations

import asyncio
from importlib import import_module

from worker.api.http.app import Application
from worker.api.http.off_loop import in_background
from worker.api.http.operation import Dialect
from worker.api.http.page import pages
from worker.api.http.state import AppState

_FOLDERS = (
    "native",
    "openai",
    "responses",
    "anthropic",
    "llama_server",
    "ollama",
)
"""Folders of `worker.api.dialects`; each has a `DIALECT` in its `routes.py`."""
DIALECTS: tuple[Dialect, ...] = tuple(
    import_module(f"worker.api.dialects.{folder}.routes").DIALECT for folder in _FOLDERS
)


def create_app(state: AppState) -> Application:
    """The ASGI application of a worker, to be served with `connection.WorkerProtocol`."""
    return Application(state, DIALECTS, beside=pages() if state.settings.page else [])


async def build_schemas(state: AppState) -> None:
    """Build the validators of all bodies, one operation at a time.

    The import does not build them, so that the engine starts first; the first request should not
    wait for them either. Also starts the background thread: without one, the start fails.
    """
    await in_background(lambda: None)
    for dialect in DIALECTS:
        for operation in dialect.operations:
            if (body := operation.body_of(state)) is not None:
                body.model_rebuild()
                await asyncio.sleep(0)
