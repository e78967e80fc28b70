"""A port for a server that cannot choose one itself."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Free on the loopback address now, and most likely in a moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
