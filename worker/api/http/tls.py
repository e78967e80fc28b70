"""A listening socket whose connections speak TLS. Runs on the main thread's event loop.

`loop.create_server` calls a protocol's `connection_made` only after the handshake. Connections that
never begin one would not be counted, and could take all file descriptors. So this module accepts
the connections itself, and each protocol learns of its connection at once.
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
"""Until the next attempt after the system lacked a descriptor or memory for a connection."""
_DAY_SECONDS = 86400.0

_log = get_logger()


class Certificate:
    """A server's certificate and key. They are reloaded for the next client when their files have
    changed, because whatever issues them replaces them while the server runs."""

    def __init__(self, config: uvicorn.Config) -> None:
        """`config` has already loaded the files."""
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
                check_certificate(self._files)  # OpenSSL would prompt for a pass phrase
                # A new context: the old one would keep its certificate if the key's type changes.
                self._context = create_ssl_context(
                    *self._files,
                    password=None,
                    ssl_version=self._config.ssl_version,
                    cert_reqs=self._config.ssl_cert_reqs,
                    ca_certs=None,
                    ciphers=self._config.ssl_ciphers,
                )
            except (ConfigError, OSError) as error:  # as when only one of them is replaced so far
                _log.warning("certificate.unreadable", message=str(error))
            else:
                _log.info("certificate.renewed")
                self._warn()
        if time.monotonic() - self._warned_at >= _DAY_SECONDS:
            self._warn()
        return self._context


class Handshake(asyncio.Transport):
    """A connection's transport during the handshake, which it can only cancel."""

    def __init__(self, shaking: asyncio.Task[Any]) -> None:
        super().__init__()
        self._shaking = shaking

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Do nothing: there is no connection to write to yet."""

    def close(self) -> None:
        self._shaking.cancel()

    abort = close


class TlsListener:
    """The part of `asyncio.Server` that uvicorn uses; `make` is called for each connection."""

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
        # A callback, because a task cancelled before its first turn never runs its own cleanup.
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
        """Wait for the handshakes that are under way."""
        if self._shaking:
            await asyncio.wait(self._shaking)
