"""Commands whose reader leaves, as `head` does, end silently and as SIGPIPE ends programs; those
whose output cannot be written say so. Both also where the command's own folder is gone."""

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


@pytest.mark.parametrize(
    ("program", "arguments"),
    [("cpu", "--version"), ("cpu", "--help"), ("convert", "--help"), ("ray", "--version")],
)
def test_on_a_full_disk(program: str, arguments: str, warm_cache: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            (*installed(program), *arguments.split()),
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(warm_cache),
            timeout=120,
        )
    *_, sentence = done.stderr.decode().splitlines()
    assert done.returncode == 1 and sentence.endswith(": No space left on device")


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (("cpu", "plan"), 0, ""),
        (("cpu", "plan", "--model", "x.gguf"), 1, "The folder in which this was started is gone"),
    ],
)
def test_in_a_folder_that_is_gone(
    command: tuple[str, ...], code: int, words: str, warm_cache: Path, tmp_path: Path
) -> None:
    program, *arguments = command
    leave = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *installed(program), *arguments]
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        leave,
        cwd=tmp_path / "gone",
        capture_output=True,
        env=environment(warm_cache),
        text=True,
        timeout=120,
    )
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr
