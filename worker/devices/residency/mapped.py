"""Files whose pages are the model's memory: what is written to them is computed with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from worker.errors import ResidencyViolation


class MappedFiles:
    """Files as they are now. One that is replaced by another stays mapped as it was."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._known = {path: _state(path) for path in paths}

    def check(self) -> None:
        """Raises `ResidencyViolation` if one was written to."""
        for path, (file, *content) in self._known.items():
            try:
                now, *current = _state(path)
            except OSError:
                continue  # removed, or not to be seen for now
            if now == file and current != content:
                raise ResidencyViolation(
                    f"{path.name} was written to while it was served: the model is no longer the "
                    "one that was loaded. Start the worker again, and replace a model's file by "
                    "renaming another one to its name."
                )


def _state(path: Path) -> tuple[tuple[int, int], int, int]:
    status = path.stat()
    return (status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns
