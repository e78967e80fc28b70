"""A file in the cache with its final name is complete."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from builds import store
from builds.errors import BuildError
from builds.pins import FOLDER


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "build"
    with store.replacing(target) as partial:
        (partial / "a").write_text("new")
        assert not target.exists()
    assert (target / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["build"]


def test_a_failed_build_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "build"
    target.mkdir()
    (target / "a").write_text("old")
    with pytest.raises(RuntimeError), store.replacing(target) as partial:
        (partial / "a").write_text("half")
        raise RuntimeError("stopped")
    assert (target / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["build"]


def test_leftovers_of_a_killed_build_are_removed(tmp_path: Path) -> None:
    left = tmp_path / ".build.partial"
    left.mkdir()
    (left / "junk").write_text("junk")
    with store.replacing(tmp_path / "build") as partial:
        assert list(partial.iterdir()) == []
    assert not left.exists()


def test_a_second_process_waits_and_reports_it(private_cache: Path) -> None:
    code = "from builds import store\nwith store.lock('one'): print('entered', flush=True)"
    with store.lock("one"):
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=FOLDER.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stderr is not None
        assert "another process is working on one" in child.stderr.readline()
        assert child.poll() is None
    killer = threading.Timer(30, child.kill)
    killer.start()
    out, _ = child.communicate()
    killer.cancel()
    assert out == "entered\n"


def test_a_cache_that_cannot_be_made_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a user whom the system does not know and who has no home."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="/file/.* cannot be made: .*; set XDG_CACHE_HOME"):
        store.folder("wheels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    assert store.folder("wheels") == Path("/.cache/llorch-worker/wheels")
