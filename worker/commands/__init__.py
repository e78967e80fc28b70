"""The commands that take all flags of the worker, and `llorch-convert`."""

import io
import os
import sys
from collections.abc import Mapping

SUBCOMMANDS: Mapping[str, str] = {
    "plan": "Print what the model would take of the device's memory; load nothing.",
    "chat": "Talk in the terminal to the running worker; start one if none runs, or for a model.",
    "bench": "Measure what this machine gives with this model, at 1, 4 and 16 streams.",
    "health": "Ask the running worker whether it is well; exit 0 if it is.",
    "doctor": "Look at everything that a start needs; exit 0 if it would succeed.",
}
"""Each subcommand's line in `--help`; each takes all flags of the worker."""


def open_standard_files() -> None:
    """Open standard files that the parent closed; otherwise a socket, or a file that is written,
    would take their numbers."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)  # the engine process logs there, too
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding != "utf-8":
        sys.stdout.reconfigure(errors="replace")  # a plan's bars are no reason to show no plan
