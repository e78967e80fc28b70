"""The HTTP server on a listening socket. Runs on the main thread's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import socket
from collections.abc import Callable, Iterator
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from worker.api.http.connection import WorkerProtocol, protocol_with
from worker.api.http.tls import Certificate, TlsListener
from worker.observability.metrics import Cut

KEEP_ALIVE_SECONDS = 75
"""Longer than common proxies and clients keep idle connections (60 s), so that none of them sends
a request into a connection that is being closed."""
CLOSE_SECONDS = 2
"""How long open connections have, after the drain, to receive their last bytes."""


class Server(uvicorn.Server):
    """uvicorn without its signal handlers; the lifecycle stops it after the drain."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ends = asyncio.Event()

    def end(self, *, now: bool = False) -> None:
        """Make `serve` return once all connections have ended, or with `now` without that wait."""
        self.should_exit, self.force_exit = True, now
        self._ends.set()

    async def main_loop(self) -> None:
        """Run until `end`. uvicorn's own loop polls ten times a second; once is enough to update
        the `Date` of answers."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), 1.0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.ssl is None:
            await super().startup(sockets)
        else:
            make = functools.partial(
                cast(type[WorkerProtocol], self.config.http_protocol_class),
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
            )
            certificate = Certificate(self.config)
            self.servers = [TlsListener(each, make, certificate) for each in sockets or ()]  # type: ignore[misc]
            self.started = True
        # Garbage collection blocks the event loop: exclude permanent objects and run it less often.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 4, 100)


def server_for(
    app: ASGIApp,
    patience_seconds: float,
    on_cut: Callable[[Cut], None],
    certificate: tuple[str, str] | None = None,
    *,
    files_each: int = 1,
) -> Server:
    """A client that leaves its answer unread for `patience_seconds` is cut off. `on_cut` is called
    with the reason for each client that is cut off. Each connection may need `files_each` file
    descriptors.

    With the PEM files of a certificate chain and its key, the server speaks only HTTPS.
    """
    certfile, keyfile = certificate or (None, None)
    return Server(
        uvicorn.Config(
            app,
            http=protocol_with(patience_seconds, on_cut, files_each),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=CLOSE_SECONDS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            ssl_certfile=certfile,
            ssl_keyfile=keyfile,
        )
    )
