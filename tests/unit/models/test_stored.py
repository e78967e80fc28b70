"""Marks of files in use."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.disk import flock_of_nfs
from worker.models.stored import hold, is_held


@pytest.mark.parametrize("flock", [fcntl.flock, flock_of_nfs])
def test_a_file_that_another_program_has_locked_is_not_waited_for(
    flock: Callable[[int, int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    with path.open("rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        assert hold(path) is None
        fcntl.flock(theirs, fcntl.LOCK_UN)
    monkeypatch.setattr("fcntl.flock", flock)
    mark = hold(path)
    assert mark is not None and is_held(path)
    mark.close()
    assert not is_held(path)
