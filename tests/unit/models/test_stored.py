"""Marks of files in use, and the listing of the cache."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.disk import flock_of_nfs
from worker.models.stored import hold, is_held, stored_models


def test_a_file_that_vanishes_meanwhile_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "converted/0123").mkdir(parents=True)
    (gone := tmp_path / "converted/0123/m.gguf.partial").touch()

    def named(_folder: Path) -> str:
        gone.unlink(missing_ok=True)
        return "m"

    monkeypatch.setattr("worker.models.stored._converted_name", named)
    assert [each.size_bytes for each in stored_models(tmp_path)] == [0]


@pytest.mark.parametrize("flock", [fcntl.flock, flock_of_nfs])
def test_a_file_that_another_program_has_locked_is_not_waited_for(
    flock: Callable[[int, int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert hold(path) is None
        fcntl.flock(file, fcntl.LOCK_UN)
    monkeypatch.setattr("fcntl.flock", flock)
    mark = hold(path)
    assert mark is not None and is_held(path)
    mark.close()
    assert not is_held(path)
