"""A console for styled output of commands."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    def on_broken_pipe(self) -> None:
        """End the command as `cli` does for all others; rich would exit with 1."""
        raise BrokenPipeError
