"""What a child process inherits of the environment, and how one has ended. In all processes."""

from __future__ import annotations

import os
import re
import signal

_SECRET = re.compile("(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE)S?(_|$)", re.IGNORECASE)
"""In names such as `HF_TOKEN`, `LLORCH_WORKER_TOKEN`, `AWS_SECRET_ACCESS_KEY`; not in
`TOKENIZERS_PARALLELISM`."""
_WITH_PASSWORD = re.compile("://[^/?#]*@")
"""An address, such as a proxy's or the pool's."""


def inherited() -> dict[str, str]:
    """The variables, without secrets, for a process that a model's files may take over."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not _SECRET.search(name) and not _WITH_PASSWORD.search(value)
    }
    # Landlock binds only threads that come later, and NumPy would have one for each core.
    return kept | {"OPENBLAS_NUM_THREADS": "1"}


_MEANT = {
    "SIGBUS": "a file that is mapped became shorter, or cannot be read",
    "SIGILL": "a library has an instruction that this processor lacks",
    "SIGKILL": "from outside, most likely by the kernel for lack of memory",
}
"""What ends a process by a signal, where that is not a fault of its code."""


def how_it_ended(returncode: int | None, *, by_worker: bool = False) -> str:
    """How a process ended: `killed by SIGABRT`, `exit code 3`; of what others may have done to it
    also what that means, unless the worker has killed it."""
    if returncode is None:
        return "still there after SIGKILL"
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
            return f"killed by {name}" + (
                f": {_MEANT[name]}" if name in _MEANT and not by_worker else ""
            )
        except ValueError:
            return f"killed by signal {-returncode}"
    return f"exit code {returncode}"
