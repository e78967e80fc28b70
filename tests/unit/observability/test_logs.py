"""The log and its reader: output on a terminal, and readers that stop reading."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EVIL = "\x1b]0;evil\x07\x9b2J\u202e\u2028\n{}forged"
WRITES = f"""\
import sys
from worker.observability.logs import configure, get_logger
configure("info", sys.argv[1])
get_logger().info("request.answered", path="/" + {EVIL!r}, job_id="é\x1b[31m", status=404)
try:
    raise ValueError({EVIL!r})
except ValueError:
    get_logger().exception("request.broken")
"""


def written(format: str) -> list[str]:
    command = [sys.executable, "-c", WRITES, format]
    done = subprocess.run(command, capture_output=True, check=True)
    return done.stderr.decode().removesuffix("\n").split("\n")


def test_console_lines_escape_control_characters() -> None:
    line, *trace = written("console")
    assert (
        "é\\x1b[31m" in line and "/\\x1b]0;evil\\x07\\x9b2J\\u202e" in line and "status=404" in line
    )
    assert all(each.isprintable() for each in (line, *trace))
    assert "request.broken" in trace[0] and "    {}forged" in trace
    assert all(each.startswith("    ") for each in trace[1:]), "none could be a line of its own"


def test_json_lines_escape_control_characters() -> None:
    answered, broken = written("json")
    assert answered.isprintable() and broken.isprintable() and "é" in answered
    assert json.loads(answered)["path"] == "/" + EVIL
    assert EVIL in json.loads(broken)["exception"]


def test_the_error_of_a_command_escapes_control_characters(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f"{json.dumps(EVIL)} = 1")
    command = [sys.executable, "-c", "from worker.cli import cpu; cpu()", "plan"]
    done = subprocess.run([*command, "--config", str(file)], capture_output=True)
    sentence = done.stderr.decode().rstrip("\n").split("\n")[-1]
    assert sentence.startswith("llorch-cpu: \\x1b]0;evil") and sentence.isprintable()


def unread(kind: str) -> tuple[int, int]:
    """Return both ends of a full pipe that nobody reads."""
    if kind == "pipe":
        reader, writer = os.pipe()
    else:
        here, there = socket.socketpair()
        reader, writer = here.detach(), there.detach()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"." * 4096)
    os.set_blocking(writer, True)
    return reader, writer


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_logging_does_not_wait_for_a_reader_that_stops(kind: str) -> None:
    reader, writer = unread(kind)
    command = [sys.executable, "-c", WRITES, "console"]
    subprocess.run(command, stderr=writer, timeout=60, check=True)
    os.close(writer)
    os.close(reader)
