"""The ASGI application: the routes, the gate before them, and the handlers of errors."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from worker.api.dialects.anthropic.routes import ROUTES as ANTHROPIC_ROUTES
from worker.api.dialects.llama_server.routes import ROUTES as LLAMA_SERVER_ROUTES
from worker.api.dialects.native.info import ROUTES as INFO_ROUTES
from worker.api.dialects.native.probes import ROUTES as PROBE_ROUTES
from worker.api.dialects.native.routes import ROUTES as NATIVE_ROUTES
from worker.api.dialects.openai.routes import ROUTES as OPENAI_ROUTES
from worker.api.dialects.responses.routes import ROUTES as RESPONSES_ROUTES
from worker.api.http.errors import on_disconnect, on_http_exception, on_worker_error
from worker.api.http.gate import Gate
from worker.api.http.page import page_routes
from worker.api.http.state import AppState
from worker.errors import WorkerError

ROUTES = [
    *PROBE_ROUTES,
    *NATIVE_ROUTES,
    *INFO_ROUTES,
    *OPENAI_ROUTES,
    *RESPONSES_ROUTES,
    *ANTHROPIC_ROUTES,
    *LLAMA_SERVER_ROUTES,
]


async def build_schemas(state: AppState) -> None:
    """Build the validators of all bodies, one route at a time.

    The import does not build them, because the engine should start first. The first request should
    not wait for them either.
    """
    for route in ROUTES:
        if (body := route.body_of(state)) is not None:
            body.model_rebuild()
            await asyncio.sleep(0)


def create_app(state: AppState) -> Starlette:
    """The HTTP surface around its collaborators; serve it with `connection.WorkerProtocol`."""
    app = Starlette(
        routes=[*ROUTES, *(page_routes() if state.settings.page else [])],
        middleware=[Middleware(Gate, state)],
        exception_handlers={
            WorkerError: on_worker_error,
            HTTPException: on_http_exception,
            ClientDisconnect: on_disconnect,
        },
    )
    app.router.redirect_slashes = False  # the gate removes a trailing slash
    app.state.worker = state
    return app
