"""A listening socket whose connections speak TLS. Runs on the main thread's event loop.

`loop.create_server` tells a protocol of its connection when the handshake is done. Connections that
never begin it would then be counted by nobody, and take all descriptors. So they are accepted here,
and each protocol knows of its connection from then on.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.config import create_ssl_context

from worker.api.http.connection import WorkerProtocol
from worker.errors import ConfigError
from worker.observability.logs import get_logger
from worker.setting_files import certificate_trouble, check_certificate, version_of

ACCEPT_RETRY_SECONDS = 0.2
"""Until the next try where the system has no descriptor or memory for a connection."""
_DAY_SECONDS = 86400.0

_log = get_logger()


class Certificate:
    """A server's certificate and key as their files are when a client comes: what issues them
    replaces them while the server runs."""

    def __init__(self, config: uvicorn.Config) -> None:
        """`config` has loaded what the files hold now."""
        self._config, self._context = config, config.ssl
        self._files = str(config.ssl_certfile), str(config.ssl_keyfile)
        self._versions = self._on_disk()
        self._warn()

    def _on_disk(self) -> list[object]:
        return [version_of(file) for file in self._files]

    def _warn(self) -> None:
        self._warned_at = time.monotonic()
        if why := certificate_trouble(self._files[0]):
            _log.warning("certificate.expires", message=f"{why}.")

    @property
    def context(self) -> ssl.SSLContext | None:
        if (versions := self._on_disk()) != self._versions:
            self._versions = versions
            try:
                check_certificate(self._files)  # OpenSSL alone would wait for a pass phrase
                # A new one: the old one keeps its certificate beside that of another kind of key.
                self._context = create_ssl_context(
                    *self._files,
                    password=None,
                    ssl_version=self._config.ssl_version,
                    cert_reqs=self._config.ssl_cert_reqs,
                    ca_certs=None,
                    ciphers=self._config.ssl_ciphers,
                )
            except (ConfigError, OSError) as error:  # as between the first file and the second
                _log.warning("certificate.unreadable", message=str(error))
            else:
                _log.info("certificate.renewed")
                self._warn()
        if time.monotonic() - self._warned_at >= _DAY_SECONDS:
            self._warn()
        return self._context


class Handshake(asyncio.Transport):
    """A connection's transport while its handshake is under way: it can be given up."""

    def __init__(self, shaking: asyncio.Task[Any]) -> None:
        super().__init__()
        self._shaking = shaking

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Nothing can be said yet."""

    def close(self) -> None:
        self._shaking.cancel()

    abort = close


class TlsListener:
    """What uvicorn needs of an `asyncio.Server`. `make` makes a protocol for each connection."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], WorkerProtocol],
        certificate: Certificate,
    ) -> None:
        listener.setblocking(False)
        self._listener, self._make, self._certificate = listener, make, certificate
        self._loop = asyncio.get_running_loop()
        self._shaking: set[asyncio.Task[Any]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener, self._accept)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            self._loop.remove_reader(self._listener)
            again = functools.partial(self._loop.add_reader, self._listener, self._accept)
            self._retry = self._loop.call_later(ACCEPT_RETRY_SECONDS, again)
            return
        client.setblocking(False)
        protocol = self._make()
        shaking = asyncio.create_task(
            self._loop.connect_accepted_socket(
                lambda: protocol, client, ssl=self._certificate.context
            )
        )
        self._shaking.add(shaking)
        # A task that is cancelled before its first turn runs nothing of its own.
        shaking.add_done_callback(functools.partial(self._end, client, protocol))
        protocol.connection_accepted(Handshake(shaking))

    def _end(
        self, client: socket.socket, protocol: WorkerProtocol, shaking: asyncio.Task[Any]
    ) -> None:
        self._shaking.discard(shaking)
        if shaking.cancelled() or shaking.exception() is not None:
            client.close()
            protocol.handshake_failed()

    def close(self) -> None:
        """Accept no further connection."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Until no handshake is under way."""
        if self._shaking:
            await asyncio.wait(self._shaking)
