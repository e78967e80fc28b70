"""A Ctrl-C that comes where Python can raise nothing ends a command all the same."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.worker import environment

PROGRAM = """
import signal, sys, time, types

number, ignored = map(int, sys.argv[1:])
signal.signal(number, signal.default_int_handler)
if ignored:
    signal.signal(ignored, signal.SIG_IGN)

class Lost:
    def __del__(self):
        signal.raise_signal(number)
        time.sleep(0)

def run(arguments):
    Lost()
    time.sleep(3600)
    return 0

module = sys.modules["a_command"] = types.ModuleType("a_command")
module.run = run
from worker.cli import _command
_command("a_command", "run")
"""


@pytest.mark.parametrize(
    ("number", "ignored"),
    [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGTERM, signal.SIGINT)],
)
def test_it_is_neither_lost_nor_shown(number: int, ignored: int, tmp_path: Path) -> None:
    """Nor is what stops a command as Ctrl-C does, also behind a shell's `&`, which ignores that. A
    command that waits stops at once."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(int(number)), str(int(ignored))],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")
