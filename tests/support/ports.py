"""A port for a server that cannot choose one itself."""

from __future__ import annotations

import secrets
import socket

PORTS = range(20_000, 32_768)
"""Below those that kernels give to clients, and to servers that ask for any: what is free here is
taken by nobody while the server starts."""


def free_port() -> int:
    """Free on the loopback address now, and most likely in a moment."""
    while True:
        try:
            with socket.create_server(("127.0.0.1", secrets.choice(PORTS))) as probe:
                return int(probe.getsockname()[1])
        except OSError:  # taken
            continue
