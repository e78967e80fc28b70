"""Listing and evicting downloads and conversions, with the installed command's own function."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from tests.support.disk import flock_of_nfs
from tests.support.fetching import fetch
from tests.support.hub_server import COMMIT, OTHER_COMMIT, Hub, Repo
from worker.commands import convert as cli
from worker.models.resolve import bundled_folder, resolve
from worker.models.stored import hold, is_held, stored_models
from worker.settings import Settings


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder with a conversion."""
    folder = tmp_path_factory.mktemp("converted")
    asyncio.run(resolve(Settings(cache_dir=folder), str(bundled_folder())))
    return folder


@pytest.fixture
def cache(hub: Hub, tmp_path: Path, gguf_bytes: bytes, converted: Path) -> Path:
    """Two snapshots that share a file, an unfinished download and a conversion."""
    folder = Path(shutil.copytree(converted, tmp_path / "cache"))
    repo = hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes, "n.gguf": bytes(2000)})
    fetch("hf:o/r::file=m.gguf", folder)
    repo.branches["main"] = OTHER_COMMIT
    fetch("hf:o/r::file=m.gguf", folder)
    (folder / "hub/models--o--r/blobs" / f"{'c' * 64}.incomplete").write_bytes(bytes(100))
    return folder


def run(*arguments: str) -> int:
    return cli.run(["cache", *arguments])


def test_the_cache_is_listed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--cache-dir", str(cache)) == 0
    output = capsys.readouterr().out
    for words in (COMMIT[:12], "o/r (main)", "unfinished", "conversion", "Q8_0", f"in {cache}"):
        assert words in output
    assert run("--cache-dir", str(cache / "nothing")) == 0
    assert "0 B of downloads and conversions in" in capsys.readouterr().out


def test_a_cache_that_is_not_a_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, link = tmp_path / "a-file", tmp_path / "a-link"
    file.touch()
    link.symlink_to("nothing")
    for path in (file, link):
        assert run("--cache-dir", str(path)) == 2
        output = capsys.readouterr()
        assert f"{str(path)!r} is not a folder" in output.err and output.out == ""


def test_removing_a_snapshot_keeps_shared_files(cache: Path, gguf_bytes: bytes) -> None:
    assert run("--cache-dir", str(cache), "--remove", COMMIT[:8], "cccc") == 0
    repo = cache / "hub/models--o--r"
    assert [path.name for path in (repo / "snapshots").iterdir()] == [OTHER_COMMIT]
    assert (repo / "snapshots" / OTHER_COMMIT / "m.gguf").read_bytes() == gguf_bytes
    assert not list(repo.glob("blobs/*.incomplete"))


def test_removing_the_last_snapshot_removes_shared_files(cache: Path) -> None:
    keys = (COMMIT[:8], OTHER_COMMIT[:8], COMMIT[:9])
    assert run("--cache-dir", str(cache), "--remove", *keys) == 0
    assert not list((cache / "hub").glob("models--o--r"))


def test_a_conversion_that_was_not_used_for_long_is_removed(cache: Path, hub: Hub) -> None:
    (converted,) = (cache / "converted").iterdir()
    os.utime(converted, (0, time.time() - 3 * 86_400))
    assert run("--cache-dir", str(cache), "--older-than", "2") == 0
    assert not converted.exists() and list((cache / "hub").rglob("m.gguf"))
    settings = Settings(cache_dir=cache)
    found = asyncio.run(resolve(settings, str(bundled_folder())))
    os.utime(converted, (0, time.time() - 3 * 86_400))
    assert asyncio.run(resolve(settings, str(bundled_folder()))) == found
    assert run("--cache-dir", str(cache), "--older-than", "2") == 0
    assert converted.exists(), "its use counts"


def test_a_foreign_file_is_neither_listed_nor_removed(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as the one that a Mac's Finder leaves in each folder it has shown."""
    for folder in ("converted", "hub"):
        (cache / folder / ".DS_Store").write_bytes(b"icons")
    assert run("--cache-dir", str(cache)) == 0
    assert ".DS_Store" not in capsys.readouterr().out
    assert run("--cache-dir", str(cache), "--older-than", "0") == 0
    assert [path.name for path in (cache / "converted").iterdir()] == [".DS_Store"]


def test_an_unfinished_download_is_removed_with_the_last_snapshot(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--cache-dir", str(cache), "--older-than", "0") == 0
    assert capsys.readouterr().out.count("removed ") == 4
    assert list(cache.rglob("*.gguf")) == list(cache.rglob("*.incomplete")) == []


def test_a_snapshot_is_as_old_as_its_own_files(hub: Hub, tmp_path: Path) -> None:
    repo = hub.repos["o/r"] = Repo({"m.gguf": bytes(2000)})
    old, _ = fetch("hf:o/r::file=m.gguf", tmp_path)
    repo.branches["main"], repo.files["m.gguf"] = OTHER_COMMIT, bytes(3000)
    new, _ = fetch("hf:o/r::file=m.gguf", tmp_path)
    os.utime(old.path.resolve(), (0, time.time()))
    assert run("--cache-dir", str(tmp_path), "--older-than", "2") == 0
    assert new.path.exists() and not old.path.exists()


def test_a_key_must_match_exactly_one_entry(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in ("aaa", "none-such", ""):
        assert run("--cache-dir", str(cache), "--remove", key) == 2
        assert "must be a prefix" in capsys.readouterr().err
    assert len(list((cache / "hub/models--o--r/snapshots").iterdir())) == 2


def test_a_running_conversion_is_not_removed(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (converted,) = (cache / "converted").iterdir()
    with FileLock(converted / "model-q8_0.lock"):
        assert run("--cache-dir", str(cache), "--remove", converted.name) == 3
    assert "converted; nothing was removed" in capsys.readouterr().err and converted.exists()
    assert run("--cache-dir", str(cache), "--remove", converted.name) == 0
    assert not converted.exists()


@pytest.mark.parametrize("days", ["-1", "nan", "long"])
def test_days_must_be_a_positive_number(
    cache: Path, days: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("--cache-dir", str(cache), "--older-than", days)
    assert f"argument --older-than: '{days}' is not a number of days" in capsys.readouterr().err


def test_a_running_download_is_not_removed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (partial,) = cache.glob("hub/*/blobs/*.incomplete")
    snapshot = next(cache.glob("hub/models--o--r/snapshots/*"))
    with FileLock(cache / "hub/.locks/models--o--r" / f"{'c' * 64}.resume.lock"):
        assert run("--cache-dir", str(cache), "--remove", "cccc") == 3
        assert run("--cache-dir", str(cache), "--remove", snapshot.name) == 3, "nor its repository"
        assert snapshot.exists()
    assert "being downloaded" in capsys.readouterr().err and partial.exists()
    assert run("--cache-dir", str(cache), "--remove", "cccc") == 0
    assert not partial.exists()


def test_a_file_that_vanishes_meanwhile_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "converted/0123").mkdir(parents=True)
    (gone := folder / "m.gguf.partial").touch()

    def named(_files: Sequence[Path]) -> str:
        """At each listing another one is gone."""
        gone.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        return "m"

    monkeypatch.setattr("worker.models.stored._converted_name", named)
    assert [each.size_bytes for each in stored_models(tmp_path)] == [0]
    assert stored_models(tmp_path) == []


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
