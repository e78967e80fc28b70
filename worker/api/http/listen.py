"""The listening socket and the HTTP server on it. Runs on the main thread's event loop."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import stat
from collections.abc import Callable, Iterator, Sequence

import uvicorn
from starlette.types import ASGIApp

from worker.api.http.connection import protocol_with
from worker.errors import ConfigError, PortInUse

KEEP_ALIVE_SECONDS = 75
"""Idle connections stay open longer than those of usual proxies and clients (60 s), so that none of
them sends a request into a connection that is being closed."""
CLOSE_SECONDS = 2
"""After the drain, open connections have this long to take their last bytes."""


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: the lifecycle stops it, after the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # A garbage collection blocks the event loop. Permanent objects are excluded from it, and
        # collections run less often.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)


Certificate = tuple[str, str]
"""The files of a certificate chain and of its key, both in PEM."""


def server_for(
    app: ASGIApp,
    patience_seconds: float,
    on_cut: Callable[[], None],
    certificate: Certificate | None = None,
) -> Server:
    """A client that leaves its answer unread for `patience_seconds` is cut, and counted.

    With a certificate it speaks HTTPS and nothing else.
    """
    certfile, keyfile = certificate or (None, None)
    return Server(
        uvicorn.Config(
            app,
            http=protocol_with(patience_seconds, on_cut),
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


def listen_on(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """A listening socket for each address, on one port; raises as `listen`."""
    listeners: list[socket.socket] = []
    try:
        for host in hosts:
            taken = int(listeners[0].getsockname()[1]) if listeners else port
            listeners.append(listen(host, taken, beside_others=len(hosts) > 1))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def listen(
    host: str, port: int, *, shared: bool = False, beside_others: bool = False
) -> socket.socket:
    """Open a listening socket; raises `PortInUse` or `ConfigError`.

    Those that are `shared` may have one port, each some of its connections. One that is
    `beside_others` leaves them the addresses of IPv4 if it has those of IPv6.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else "not a host name"
        raise ConfigError(
            f"--host is {host!r}, which does not resolve to an address: {reason}.", field="host"
        ) from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if beside_others and family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _explain(error, host, port) from None
    return listener


def listen_at(path: str) -> socket.socket:
    """Open a listening Unix socket, and remove the one that a worker left there which is gone.

    Raises `PortInUse` if another process listens there, or `ConfigError`.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            _remove_left(path)
        listener.bind(path)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)  # a path that is too long has no number
        message = f"--uds is {path!r}, which cannot be listened on: {reason}."
        raise ConfigError(message, field="uds") from None
    return listener


def _remove_left(path: str) -> None:
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise FileExistsError(errno.EEXIST, "something else is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            asking.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise PortInUse(f"{path} is in use by another process; choose another --uds.")


def _explain(error: OSError, host: str, port: int) -> PortInUse | ConfigError:
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"Port {port} on {host} is in use by another process; choose another --port, "
            "or 0 for any free one.",
            port=port,
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(
            f"--port is {port}, which this user may not listen on; choose one over 1023.",
            field="port",
        )
    return ConfigError(
        f"--host is {host!r}, which cannot be listened on: {error.strerror}.", field="host"
    )


def is_loopback(listener: socket.socket) -> bool:
    if listener.family == socket.AF_UNIX:
        return True
    host = str(listener.getsockname()[0])
    return host == "::1" or host.startswith("127.")


def is_wildcard(host: str) -> bool:
    return host in ("0.0.0.0", "::", "[::]", "")


def uri_of(host: str, port: int, *, is_secure: bool = False) -> str:
    scheme = "https" if is_secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
