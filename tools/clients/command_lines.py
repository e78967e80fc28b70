"""Runs clients that are commands, in a folder of their own and without the user's settings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def ran(command: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> str:
    """Return the output of a command of this environment; raises if it fails."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TZ") if name in os.environ}
    environment = {**kept, "HOME": str(folder), "NO_PROXY": "*", **(variables or {})}
    tool = Path(sys.executable).parent / command[0]
    done = subprocess.run(
        [str(tool) if tool.exists() else command[0], *command[1:]],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=58,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, (done.stderr or done.stdout)[-250:])
    return done.stdout
