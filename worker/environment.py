"""What a child process inherits of the environment. Used in all processes."""

from __future__ import annotations

import os
import re

_SECRET = re.compile("(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE)S?(_|$)", re.IGNORECASE)
"""In names such as `HF_TOKEN`, `LLORCH_WORKER_TOKEN`, `AWS_SECRET_ACCESS_KEY`; not in
`TOKENIZERS_PARALLELISM`."""
_WITH_PASSWORD = re.compile("://[^/?#]*@")
"""An address, such as a proxy's or the pool's."""


def without_secrets() -> dict[str, str]:
    """For a process that reads a model's files, which may take it over."""
    return {
        name: value
        for name, value in os.environ.items()
        if not _SECRET.search(name) and not _WITH_PASSWORD.search(value)
    }
