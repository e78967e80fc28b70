"""Folders of killed converters are cleared away, those of living ones are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from worker.convert.scratch import Scratch

HOLDS = "import sys, pathlib; from worker.convert.scratch import Scratch; "
HOLDS += "Scratch(pathlib.Path(sys.argv[1])); print(flush=True); sys.stdin.read()"


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    living, killed = (subprocess.Popen(command, **pipes) for _ in range(2))  # type: ignore[call-overload]
    for child in (living, killed):
        child.stdout.readline()
    (next(iter(tmp_path.iterdir())) / "large").write_bytes(b"1")
    assert len(list(tmp_path.iterdir())) == 2
    killed.kill()
    killed.communicate()
    with Scratch(tmp_path) as mine:
        assert len(list(tmp_path.iterdir())) == 2 and mine.is_dir()
    assert len(list(tmp_path.iterdir())) == 1
    living.communicate()


def test_a_parent_that_is_not_there_yet_is_the_next_above_it(tmp_path: Path) -> None:
    with Scratch(tmp_path / "not/there") as mine:
        assert mine.parent == tmp_path
    assert list(tmp_path.iterdir()) == []
