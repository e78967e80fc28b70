"""The engine's side of the process that renders chat templates (`sandbox`). Intake threads."""

from __future__ import annotations

import atexit
import json
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

_COMPILE_SECONDS = 5.0
"""Of a processor; constants are computed then. Templates take 0.1."""


class Refused(Exception):
    """`str` is a clause that says why."""


class Renderer:
    """Starts the process at once, and waits for it at the first template."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "worker.engine.text.sandbox"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid = self._process.pid
        self._turn = threading.Lock()

    def close(self) -> None:
        with self._process:  # closes its input, which ends it
            pass

    def compile(self, source: str) -> None:
        """
        Raises:
            Refused: the source is no template, or one that cannot be trusted.
        """
        self._ask([source, None, _COMPILE_SECONDS])

    def render(self, source: str, variables: Mapping[str, Any], seconds: float) -> str:
        """The text of a template, which takes at most so many seconds of a processor.

        Raises:
            Refused: the template refuses the variables, or takes too much time or memory.
        """
        return self._ask([source, variables, seconds])

    def _ask(self, request: list[Any]) -> str:
        try:
            line = json.dumps(request).encode() + b"\n"
        except RecursionError:
            raise Refused("its values are nested too deeply") from None
        asking, answers = self._process.stdin, self._process.stdout
        assert asking is not None and answers is not None
        with self._turn:
            while select.select([answers], [], [], 0)[0] and answers.readline():
                pass  # of a process that died between two requests
            asking.write(line)
            asking.flush()
            answer = answers.readline()
        if not answer:
            raise RuntimeError("the process that renders chat templates has died")
        text, reason = json.loads(answer)
        if reason is not None:
            raise Refused(reason)
        return str(text)


@cache
def renderer() -> Renderer:
    """The one of this process, and for its time."""
    started = Renderer()
    atexit.register(started.close)
    return started
