"""Which of Python's packages a process may read, and what a GPU's driver may write."""

from __future__ import annotations

import os
import subprocess
import sys
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
        if path.endswith("secret"):  # a test may run as root, whom file modes do not stop
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert {str(folder), str(elsewhere / "module.py")} <= set(walls._python())


NAMES_A_THREAD = """
import threading
from worker.confinement import walls
try:
    walls._restrict_files(set(walls._rules(BACKEND, [], [])))
except OSError:
    print("no Landlock"); raise SystemExit
def name():
    entry = f"/proc/self/task/{threading.get_native_id()}/comm"
    open(entry, "w").write("named")
    print(open(entry).read())
    open("/tmp/llorch-not-mine", "w")
threading.Thread(target=name).start()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has Landlock")
@pytest.mark.parametrize("backend", ["cuda", "vulkan", "cpu"])
def test_a_drivers_threads_get_names_inside_the_walls(backend: str) -> None:
    """CUDA opens such an entry for writing with truncation, and does not start if it cannot."""
    code = NAMES_A_THREAD.replace("BACKEND", repr(backend))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if "no Landlock" in done.stdout:
        pytest.skip("this kernel has no Landlock")
    assert ("named" in done.stdout) == (backend != "cpu"), done.stderr
    assert "PermissionError" in done.stderr and not Path("/tmp/llorch-not-mine").exists()
