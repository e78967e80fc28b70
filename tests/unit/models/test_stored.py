"""Marks of files in use."""

from __future__ import annotations

import fcntl
from pathlib import Path

from worker.models.stored import hold, is_held


def test_a_file_that_another_program_has_locked_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    with path.open("rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        assert hold(path) is None
        fcntl.flock(theirs, fcntl.LOCK_UN)
    mark = hold(path)
    assert mark is not None and is_held(path)
    mark.close()
    assert not is_held(path)
