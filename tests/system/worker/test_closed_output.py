"""Commands whose reader leaves, like `head`, end silently and as if by SIGPIPE; commands whose
output cannot be written say so. Both hold even if the command's working folder is gone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.worker import WorkerProcess, environment, installed, run_to_exit

QUESTION = b"What is the capital of France?\n"


def ended(stdout: int, cache: Path, program: str, *arguments: str) -> tuple[int, str]:
    """Return the exit code and stderr of a command with that output."""
    done = subprocess.run(
        [*installed(program), *arguments],
        input=QUESTION,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=environment(cache),
        timeout=120,
    )
    return done.returncode, done.stderr.decode()


@pytest.fixture
def unread() -> Iterator[int]:
    """An output whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("command", ["chat", "health"])
def test_a_command_on_a_worker_whose_reader_left_ends_as_by_sigpipe(
    command: str, unread: int, worker: WorkerProcess, tmp_path: Path
) -> None:
    arguments = ("cpu", command, "--port", str(worker.port))
    assert ended(unread, tmp_path, *arguments) == (141, "")


@pytest.mark.parametrize("command", ["cpu plan", "convert list", "ray --help"])
def test_a_command_whose_reader_left_ends_as_by_sigpipe(
    command: str, unread: int, warm_cache: Path
) -> None:
    assert ended(unread, warm_cache, *command.split()) == (141, "")


@pytest.mark.parametrize("command", ["cpu --version", "convert --help", "ray --help"])
def test_a_command_that_cannot_write_its_output_says_so(command: str, warm_cache: Path) -> None:
    with open("/dev/full", "wb") as full:
        code, error = ended(full.fileno(), warm_cache, *command.split())
    assert code == 1 and error.splitlines()[-1].endswith(": No space left on device")


@pytest.mark.parametrize(
    ("command", "code"),
    [("cpu --model no.gguf", 3), ("convert no.d to.gguf", 3), ("ray up no.toml", 2)],
)
def test_an_error_that_cannot_be_written_keeps_its_exit_code(
    command: str, code: int, warm_cache: Path
) -> None:
    program, *arguments = command.split()
    with open("/dev/full", "wb") as full:
        line = [*installed(program), *arguments]
        done = subprocess.run(line, stderr=full, env=environment(warm_cache), timeout=120)
    assert done.returncode == code


@pytest.mark.parametrize("program", ["cpu", "convert", "ray", "worker"])
def test_a_usage_error_without_any_output_keeps_its_exit_code(
    program: str, warm_cache: Path
) -> None:
    line = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *installed(program), "--nothing"]
    assert subprocess.run(line, env=environment(warm_cache), timeout=120).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("plan",), 0, ""),
        (("plan", "--model", "x.gguf"), 1, "The working folder no longer exists"),
    ],
)
def test_a_command_in_a_removed_folder_runs_or_says_so(
    arguments: tuple[str, ...], code: int, words: str, warm_cache: Path, tmp_path: Path
) -> None:
    leave = ["sh", "-c", 'mkdir "$0"; cd "$0"; rmdir "$0"; exec "$@"', str(tmp_path / "gone")]
    exit = run_to_exit(*arguments, cache_dir=warm_cache, command=[*leave, *installed()])
    assert exit.code == code and words in exit.stderr and "Traceback" not in exit.stderr
