"""The argument parser of all commands: for an unknown flag, it names the one that was meant.

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
"""Matches flags, but neither texts with spaces nor negative numbers."""


class Parser(argparse.ArgumentParser):
    """An argparse parser without abbreviations that suggests a flag for an unknown one."""

    other_names: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Flags of other programs, by what the hint says of them: our own flag or variable, or a remark
    that begins with a semicolon. One of theirs can match two of ours."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Before argparse, which would read `-hf` as `-h`, and the value of an unknown flag as an
        # argument.
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
        """Like argparse's, but raises the error if stdout cannot be written."""
        try:
            (file or sys.stderr).write(message)
        except (AttributeError, OSError):
            if file is sys.stdout:
                raise

    def hint(self, unknown: str) -> str:
        """The end of the message for an unknown flag."""
        known = [each for each in self._option_string_actions if each[:2] == "--"]
        meant = [ours for ours, names in self.other_names.items() if unknown in names]
        if remark := next((each for each in meant if each[0] == ";"), ""):
            return remark
        if there := [each for each in meant if each in known or each[:2] != "--"]:
            return f"; did you mean {' or '.join(there)}?"
        return closest(unknown, known) or f"; {self.prog} --help lists them."


def whole_number(most: int) -> Callable[[str], int]:
    """An argument type for whole numbers from 1 to `most`."""

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):  # more digits than Python reads
            if text.isdecimal() and 1 <= int(text) <= most:
                return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most}")

    return parse


def add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Add a subcommand whose own help begins with its line in the list of commands.

    `commands` is the result of `add_subparsers`.
    """
    description = f"{text[0].upper()}{text[1:]}."
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=description)
    return command
