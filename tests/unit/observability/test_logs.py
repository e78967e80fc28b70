"""The log and its reader: what a terminal is shown, and who stops to read."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

import pytest

WRITES = """\
from worker.observability.logs import configure, get_logger
configure("info", "console")
asked = {"path": "/\\x1b]0;evil\\x07\\x9b2J", "job_id": "é\\x1b[31m", "status": 404}
get_logger().info("request.answered", **asked)
"""


def test_a_terminal_is_shown_control_characters_as_text() -> None:
    done = subprocess.run([sys.executable, "-c", WRITES], capture_output=True, check=True)
    line = done.stderr.decode()
    assert "é\\x1b[31m" in line and "/\\x1b]0;evil\\x07\\x9b2J" in line and "status=404" in line
    assert line.removesuffix("\n").isprintable()


def unread(kind: str) -> tuple[int, int]:
    """The two ends of a way into which nothing more fits, as nobody reads."""
    if kind == "pipe":
        reader, writer = os.pipe()
    else:
        ours, theirs = socket.socketpair()
        reader, writer = ours.detach(), theirs.detach()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"." * 4096)
    os.set_blocking(writer, True)
    return reader, writer


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_nobody_waits_for_a_reader_who_stops(kind: str) -> None:
    reader, writer = unread(kind)
    subprocess.run([sys.executable, "-c", WRITES], stderr=writer, timeout=60, check=True)
    os.close(writer)
    os.close(reader)
