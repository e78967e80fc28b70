"""The worker's HTTP API: the dialects that it speaks, one a line."""

from __future__ import annotations

import asyncio

from worker.api.dialects.anthropic.routes import DIALECT as ANTHROPIC
from worker.api.dialects.llama_server.completion import COMPLETIONS as LLAMA_SERVER
from worker.api.dialects.llama_server.routes import TEXT_TOOLS
from worker.api.dialects.native.routes import DIALECT as NATIVE
from worker.api.dialects.openai.routes import DIALECT as OPENAI
from worker.api.dialects.responses.routes import DIALECT as RESPONSES
from worker.api.http.app import Application
from worker.api.http.page import page
from worker.api.http.routes import Routes
from worker.api.http.state import AppState

DIALECTS = (NATIVE, OPENAI, RESPONSES, ANTHROPIC, LLAMA_SERVER, TEXT_TOOLS)
ROUTES = Routes(DIALECTS)


def create_app(state: AppState) -> Application:
    """The HTTP surface around its collaborators; serve it with `connection.WorkerProtocol`."""
    return Application(state, DIALECTS, beside=[page()] if state.settings.page else [])


async def build_schemas(state: AppState) -> None:
    """Build the validators of all bodies, one operation at a time.

    The import does not build them, because the engine should start first. The first request should
    not wait for them either.
    """
    for dialect in DIALECTS:
        for operation in dialect.operations:
            if (body := operation.body_of(state)) is not None:
                body.model_rebuild()
                await asyncio.sleep(0)
