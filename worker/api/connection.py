"""The HTTP protocol class that `lifecycle` gives to uvicorn: one ASGI extension more.

A client that stopped reading can only be cut at its transport: closing politely would wait for
the very bytes that it does not take. Runs on the API process's event loop.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

ABORT = "llorch.abort"


class WorkerProtocol(HttpToolsProtocol):
    """uvicorn's protocol, whose scope carries `extensions["llorch.abort"]`."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = {**(self.scope.get("extensions") or {})}
        extensions[ABORT] = self.transport.abort
        self.scope["extensions"] = extensions
