"""A port for a server that cannot choose one itself."""

from __future__ import annotations

import secrets
import socket

PORTS = range(20_000, 32_768)
"""Below the ports that kernels assign to clients and to servers that ask for any, so that a free
one is not taken while the server starts."""


def free_port() -> int:
    """Return a port that is free on the loopback address, and most likely stays so."""
    while True:
        try:
            with socket.create_server(("127.0.0.1", secrets.choice(PORTS))) as probe:
                return int(probe.getsockname()[1])
        except OSError:  # taken
            continue
