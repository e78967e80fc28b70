"""A Ctrl-C that comes where Python can raise nothing ends a command all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.worker import environment

PROGRAM = """
import signal, sys, time, types

class Lost:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
        time.sleep(0)

def run(arguments):
    Lost()
    time.sleep(60)
    return 0

module = sys.modules["a_command"] = types.ModuleType("a_command")
module.run = run
from worker.cli import _command
_command("a_command", "run")
"""


def test_it_is_neither_lost_nor_shown(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")
