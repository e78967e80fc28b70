"""The long tests stop everything they start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.system.fleet.running import Running, on_this_machine


def test_a_start_that_is_cut_off_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test may time out within `up`, after which Ray's processes run."""
    commands: list[tuple[str, ...]] = []

    def cut_off(*_: Any, **__: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(Running, "up", cut_off)
    monkeypatch.setattr(Running, "command", lambda _, *line: commands.append(line))
    with pytest.raises(TimeoutError), on_this_machine(tmp_path, ""):
        pass
    assert commands == [("down",)]
