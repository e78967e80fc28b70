"""The environment that child processes inherit, and how they ended. Used in all processes."""

from __future__ import annotations

import os
import re
import signal

_SECRET = re.compile("(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE)S?(_|$)", re.IGNORECASE)
"""Matches names such as `HF_TOKEN`, `LLORCH_WORKER_TOKEN` and `AWS_SECRET_ACCESS_KEY`, but not
`TOKENIZERS_PARALLELISM`."""
_WITH_PASSWORD = re.compile("://[^/?#]*@")
"""Matches a URL with a user or password, such as a proxy's."""


def inherited() -> dict[str, str]:
    """The environment without secrets, for a process that a model's file might take over."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not _SECRET.search(name) and not _WITH_PASSWORD.search(value)
    }
    # Landlock binds only later threads, and NumPy would start one per core at its import.
    return kept | {"OPENBLAS_NUM_THREADS": "1"}


_CAUSES = {
    "SIGBUS": "a mapped file was truncated, or cannot be read",
    "SIGILL": "a library uses an instruction that this processor lacks",
    "SIGKILL": "from outside, most likely by the kernel for lack of memory",
}
"""The likely cause of a signal, if it is not a fault in the process's code."""


def how_it_ended(returncode: int | None, *, by_worker: bool = False) -> str:
    """How a process ended, such as `killed by SIGABRT` or `exit code 3`, with the likely cause if
    that is outside the process and not the worker itself."""
    if returncode is None:
        return "still there after SIGKILL"
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
            return f"killed by {name}" + (
                f": {_CAUSES[name]}" if name in _CAUSES and not by_worker else ""
            )
        except ValueError:
            return f"killed by signal {-returncode}"
    return f"exit code {returncode}"
