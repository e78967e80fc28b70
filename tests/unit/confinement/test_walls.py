"""What of a Python's packages a process may read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker.confinement import walls


def test_a_package_that_this_user_cannot_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "site-packages", tmp_path / "elsewhere"
    for path in (folder / "secret", folder / "linked", elsewhere):
        path.mkdir(parents=True)
    (elsewhere / "module.py").touch()
    (folder / "linked/module.py").symlink_to(elsewhere / "module.py")
    monkeypatch.setattr("sys.path", [str(folder)])
    read = os.scandir

    def scandir(path: str) -> object:
        if path.endswith("secret"):  # a test may run as root, whom no mode stops
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert {str(folder), str(elsewhere / "module.py")} <= set(walls._python())
