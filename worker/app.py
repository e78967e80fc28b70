"""The ASGI application: routes, the gate before them, and errors turned into answers."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from worker.api.info import ROUTES as INFO_ROUTES
from worker.api.middleware import Gate, on_disconnect, on_http_exception, on_worker_error
from worker.api.openai.routes import ROUTES as OPENAI_ROUTES
from worker.api.routes import ROUTES
from worker.api.state import AppState
from worker.errors import WorkerError


def create_app(state: AppState) -> Starlette:
    """The HTTP surface around its collaborators; serve it with `WorkerProtocol`."""
    app = Starlette(
        routes=[*ROUTES, *INFO_ROUTES, *OPENAI_ROUTES],
        middleware=[Middleware(Gate, state)],
        exception_handlers={
            WorkerError: on_worker_error,
            HTTPException: on_http_exception,
            ClientDisconnect: on_disconnect,
        },
    )
    app.router.redirect_slashes = False  # a path that is not there is a 404, not a detour
    app.state.worker = state
    return app
