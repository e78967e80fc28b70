"""The locations of the worker's files."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from worker.installation import default_cache_dir


def test_a_user_whom_the_system_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example in a container that was started with only a user id."""

    def unknown(uid: int) -> object:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert default_cache_dir() == Path("/.cache/llorch-worker")
