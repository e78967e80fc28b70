"""Opens listening sockets, and explains failures. Used on the main thread of any process."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, NamedTuple

from worker.errors import ConfigError, PortInUse, wrong_value

_WILDCARDS = ("0.0.0.0", "::")
"""They stand for all addresses of IPv4 and of IPv6."""


def listen_on(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Open a listening socket for each address of the hosts, all on one port; raises as `listen`.

    Duplicates get one socket. If a wildcard is among a family's addresses, it replaces the others.
    """
    places = [place for host in hosts for place in _Place.all_of(host, port)]
    wildcards = {each.family: each for each in places if each.address[0] in _WILDCARDS}
    chosen = [wildcards.get(each.family, each) for each in places]
    own = {(each.family, each.address): each for each in chosen}.values()
    listeners: list[socket.socket] = []
    with ExitStack() as unless_open:
        for place in own:
            taken = int(listeners[0].getsockname()[1]) if listeners else port
            listener = _listen(place, taken, beside_others=len(own) > 1)
            listeners.append(unless_open.enter_context(listener))
        unless_open.pop_all()
    return listeners


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Open a listening socket; raises `PortInUse` or `ConfigError`.

    Several `shared` sockets can listen on one port, and the kernel distributes its connections.
    """
    return _listen(_Place.all_of(host, port)[0], port, shared=shared)


class _Place(NamedTuple):
    """An address of a host on which to listen."""

    host: str
    family: int
    address: tuple[Any, ...]
    """The family's socket address: address and port, with IPv6 also flow info and scope id."""

    @classmethod
    def all_of(cls, host: str, port: int) -> list[_Place]:
        """The host's addresses that belong to this machine; if none does, its first address.
        Raises `ConfigError` if the host has no address."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (socket.gaierror, UnicodeError) as error:
            reason = error.strerror if isinstance(error, socket.gaierror) else "not a host name"
            why = f"which does not resolve to an address: {reason}"
            raise wrong_value("host", host, why) from None
        places = [cls(host, family, address) for family, _, _, _, address in found]
        return [each for each in places if each._is_here()] or places[:1]

    def _is_here(self) -> bool:
        try:
            with socket.socket(self.family, socket.SOCK_STREAM) as tried:
                tried.bind((self.address[0], 0, *self.address[2:]))
        except OSError:
            return False
        return True


def _listen(
    place: _Place, port: int, *, shared: bool = False, beside_others: bool = False
) -> socket.socket:
    """`beside_others`: restrict a socket for IPv6 to IPv6, since others have the IPv4 addresses."""
    with ExitStack() as unless_open:
        try:
            # Named, so that asyncio sets TCP_NODELAY on accepted connections (uvloop always does).
            kind = (place.family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listener = unless_open.enter_context(socket.socket(*kind))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if beside_others and place.family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((place.address[0], port, *place.address[2:]))
            listener.listen(2048)
        except OSError as error:
            raise _explain(error, place.host, port) from None
        unless_open.pop_all()
    return listener


def listen_at(path: str) -> socket.socket:
    """Open a listening Unix socket, replacing one that a dead worker left there.

    Raises `PortInUse` if another process listens there, or `ConfigError`.
    """
    is_left = is_left_at(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if is_left:
            os.unlink(path)
        listener.bind(path)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _explain_path(error, path) from None
    return listener


def check_at(path: str) -> None:
    """Raises as `listen_at` would, but changes nothing."""
    if not is_left_at(path):
        listen_at(path).close()
        os.unlink(path)
    elif not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK | os.X_OK):
        raise _explain_path(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), path)


def is_left_at(path: str) -> bool:
    """Whether the path is a socket on which nobody listens any more; false if it does not exist.

    Raises `PortInUse` if somebody listens there, or `ConfigError` if it is not a socket.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.connect(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        is_other = os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode)
        if isinstance(error, ConnectionRefusedError) and not is_other:
            return True
        other = FileExistsError(errno.EEXIST, "it exists and is not a socket")
        raise _explain_path(other if is_other else error, path) from None
    raise PortInUse(f"{path} is in use by another process; choose another --uds.")


def _explain_path(error: OSError, path: str) -> ConfigError:
    reason = error.strerror or str(error)  # an overlong path raises an error without errno
    return wrong_value("uds", path, f"which cannot be listened on: {reason}")


def _explain(error: OSError, host: str, port: int) -> PortInUse | ConfigError:
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"Port {port} on {host} is in use by another process; choose another --port, "
            "or 0 for any free one.",
            port=port,
        )
    if error.errno in (errno.EACCES, errno.EPERM) and 0 < port < 1024:
        return wrong_value("port", port, "which needs more privileges; choose one above 1023")
    return wrong_value("host", host, f"which cannot be listened on: {error.strerror}")


def is_local(listener: socket.socket) -> bool:
    """Whether only this machine can connect to it."""
    return listener.family == socket.AF_UNIX or _address_of(listener).is_loopback


def is_wildcard(listener: socket.socket) -> bool:
    """Whether it listens on all addresses of this machine, however they were given."""
    return _address_of(listener).is_unspecified


def _address_of(listener: socket.socket) -> IPv4Address | IPv6Address:
    return ip_address(listener.getsockname()[0])


def uri_of(host: str, port: int, *, is_secure: bool = False) -> str:
    return f"{'https' if is_secure else 'http'}://{authority(host, port)}"


def authority(host: str, port: int) -> str:
    """Host and port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
