"""What a child process inherits of the environment. Used in all processes."""

from __future__ import annotations

import os
import re

_SECRET = re.compile("(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE)S?(_|$)", re.IGNORECASE)
"""In names such as `HF_TOKEN`, `LLORCH_WORKER_TOKEN`, `AWS_SECRET_ACCESS_KEY`; not in
`TOKENIZERS_PARALLELISM`."""
_WITH_PASSWORD = re.compile("://[^/?#]*@")
"""An address, such as a proxy's or the pool's."""


def inherited() -> dict[str, str]:
    """The variables, without secrets, for a process that a model's files may take over."""
    return {
        name: value
        for name, value in os.environ.items()
        if not _SECRET.search(name) and not _WITH_PASSWORD.search(value)
    }
