"""What commands print with styles."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    def on_broken_pipe(self) -> None:
        """Let the command end as each other does; rich would exit with 1."""
        raise BrokenPipeError
