"""Ending a build ends all processes that it started."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from builds import compile

BUILDS = Path(compile.__file__).parent
MAIN = """
import os
from pathlib import Path
from builds import compile

def main():
    try:
        compile._run(["sh", "-c", "sleep 1000 & sleep 1000"], dict(os.environ), Path("log"))
    except KeyboardInterrupt:
        return 130
"""
COMMAND = """
import sys
from pathlib import Path
from worker.commands import install_engine
sys.exit(install_engine._module("builds", "cpu", path=Path.cwd()))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with this project's package `builds`, whose compiler runs for a thousand seconds."""
    package = tmp_path / "builds"
    package.mkdir()
    (package / "__init__.py").write_text(f"__path__.append({str(BUILDS)!r})")
    (package / "cli.py").write_text(MAIN)
    return tmp_path


def survivors(
    command: list[str], ends: signal.Signals, folder: Path, children: int
) -> list[psutil.Process]:
    """Return descendants of the command that outlive the signal to it."""
    process = subprocess.Popen([sys.executable, *command], cwd=folder)
    known = psutil.Process(process.pid)
    deadline = time.monotonic() + 60
    while len(found := known.children(recursive=True)) < children:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    # Once its handlers are installed, the starter only waits.
    while not all(each.status() == psutil.STATUS_SLEEPING for each in (known, *found)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(ends)
    process.wait(60)
    deadline = time.monotonic() + 60
    while left := [each for each in found if is_running(each)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def is_running(process: psutil.Process) -> bool:
    """Whether it is still running; an orphan may never be reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("ends", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_the_compilers_end_with_their_build(ends: signal.Signals, folder: Path) -> None:
    assert survivors(["-m", "builds"], ends, folder, children=3) == []


ENDS = [signal.SIGINT, signal.SIGTERM]
if sys.platform == "linux":  # the kernel signals the build there
    ENDS += [signal.SIGHUP, signal.SIGKILL]


@pytest.mark.parametrize("ends", ENDS)
def test_a_build_ends_with_the_command_that_started_it(ends: signal.Signals, folder: Path) -> None:
    assert survivors(["-c", COMMAND], ends, folder, children=4) == []
