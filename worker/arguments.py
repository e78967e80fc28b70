"""The parser of all commands: a flag that none of them has is answered with the one that was meant.

Runs on the main thread, before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from worker.errors import shortened
from worker.expectations import closest

_FLAG = re.compile(r"--?[A-Za-z][^\s=]*")
"""A text has a space, and a number begins with a digit."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that takes no abbreviations, and says what an unknown flag stands for."""

    other_names: ClassVar[Mapping[str, Sequence[str]]] = {}
    """What other programs call a flag, by our name of it, or by what is to be said of those that
    have none, behind a semicolon; one of their names may stand for two of ours."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Before argparse looks, which would take `-hf` for `-h`, and the value of an unknown flag
        # for an argument.
        unknown: dict[str, str] = {}
        for each in args or ():
            name = each.partition("=")[0]
            if each == "--" or (self._subparsers and not each.startswith("-")):
                break
            if _FLAG.fullmatch(name) and name not in self._option_string_actions:
                unknown[name] = f"{name} is not a flag of {self.prog}{self.hint(name)}"
        if unknown:
            self.error(" ".join(unknown.values()))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        super().error(shortened(message))

    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse's, but the command learns what keeps it from writing to stdout."""
        try:
            (file or sys.stderr).write(message)
        except (AttributeError, OSError):
            if file is sys.stdout:
                raise

    def hint(self, unknown: str) -> str:
        """What stands behind a flag that is none here."""
        known = [each for each in self._option_string_actions if each[:2] == "--"]
        meant = [ours for ours, names in self.other_names.items() if unknown in names]
        if said := next((each for each in meant if each[0] == ";"), ""):
            return said
        if there := [each for each in meant if each in known or each[:2] != "--"]:
            return f"; did you mean {' or '.join(there)}?"
        return closest(unknown, known) or f"; {self.prog} --help lists them."


def whole_number(most: int) -> Callable[[str], int]:
    """The type of an argument that is a number from 1 to `most`."""

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):  # it has more digits than Python reads
            if text.isdecimal() and 1 <= int(text) <= most:
                return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most}")

    return parse


def add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """A subcommand whose own help begins with what the list of commands says of it.

    `commands` is what `add_subparsers` gives.
    """
    description = f"{text[0].upper()}{text[1:]}."
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=description)
    return command
