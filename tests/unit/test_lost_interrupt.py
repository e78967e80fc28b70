"""A Ctrl-C that arrives where Python cannot raise an exception still ends a command."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.worker import environment

PROGRAM = """
import asyncio, signal, sys, time, types

number, ignored, function = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
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

async def on_a_loop():
    signal.raise_signal(number)  # asks this task to end
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        run([])

module = sys.modules["a_command"] = types.ModuleType("a_command")
module.run, module.looping = run, lambda arguments: asyncio.run(on_a_loop())
from worker.cli import _command
_command("a_command", function)
"""


@pytest.mark.parametrize(
    ("number", "ignored", "function"),
    [
        (signal.SIGINT, 0, "run"),
        (signal.SIGINT, 0, "looping"),
        (signal.SIGTERM, 0, "run"),
        (signal.SIGTERM, 0, "looping"),
        (signal.SIGTERM, signal.SIGINT, "run"),
    ],
)
def test_a_lost_interrupt_ends_a_command_without_output(
    number: int, ignored: int, function: str, tmp_path: Path
) -> None:
    """So does another signal that stops a command, even after a shell's `&`, which ignores
    Ctrl-C. A waiting command stops at once."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(int(number)), str(int(ignored)), function],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


FIRST_IMPORTS = """
import signal, sys
from worker import cli
def note(number, handler):
    assert not {"socket", "subprocess", "msgspec"} & set(sys.modules), "it is still ignored"
    sys.exit(0)
signal.signal = note
cli.cpu()
sys.exit("no signal is handled")
"""


def test_signals_are_handled_before_anything_is_imported_that_takes_long(tmp_path: Path) -> None:
    """A container's first process ignores those that it does not handle."""
    subprocess.run([sys.executable, "-c", FIRST_IMPORTS], env=environment(tmp_path), check=True)
