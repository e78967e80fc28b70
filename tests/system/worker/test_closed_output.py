"""Commands whose reader leaves, as `head` does, end silently and as SIGPIPE ends programs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.worker import WorkerProcess, environment, installed

QUESTION = b"What is the capital of France?\n"


def ended(*command: str, cache: Path) -> tuple[int, bytes]:
    """The exit code and stderr of a command whose output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            command,
            input=QUESTION,
            stdout=writer,
            stderr=subprocess.PIPE,
            env=environment(cache),
            timeout=120,
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", ["chat", "health"])
def test_of_a_worker(command: str, worker: WorkerProcess, tmp_path: Path) -> None:
    asked = (*installed(), command, "--port", str(worker.port))
    assert ended(*asked, cache=tmp_path) == (141, b"")


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("cpu", "--help"),
        ("cpu", "plan"),
        ("convert", "list"),
        ("ray", "--help"),
    ],
)
def test_alone(program: str, arguments: str, warm_cache: Path) -> None:
    asked = (*installed(program), *arguments.split())
    assert ended(*asked, cache=warm_cache) == (141, b"")
