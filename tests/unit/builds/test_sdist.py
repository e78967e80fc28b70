"""Only the pinned sources are built."""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from builds import pins as pinned
from builds import sdist
from builds.errors import BuildError
from builds.pins import FOLDER


def test_a_tampered_sdist_stops_the_build(tmp_path: Path, private_cache: Path) -> None:
    """Through the real command: one sentence with both hashes, exit code 1, nothing made."""
    tampered = tmp_path / pinned.pins().sdist_name
    tampered.write_bytes(b"not what was pinned")
    out = tmp_path / "dist"
    command = [sys.executable, "-m", "builds", "cpu", "--sdist", str(tampered), "--out", str(out)]
    result = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True)
    assert result.returncode == 1
    assert "is not the pinned llama-cpp-python" in result.stderr
    assert pinned.pins().sdist_sha256 in result.stderr
    assert "Traceback" not in result.stderr
    assert not out.exists()
    assert not list(private_cache.glob("wheels/*/*.whl"))


def test_a_tampered_archive_in_the_cache_is_refused(private_cache: Path) -> None:
    archive = private_cache / "sdist" / pinned.pins().sdist_name
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"changed on disk")
    with pytest.raises(BuildError, match="remove the file to fetch it again"):
        sdist.fetch(pinned.pins())
    assert archive.read_bytes() == b"changed on disk"


def test_nothing_of_a_tampered_sdist_runs(
    tmp_path: Path, private_cache: Path, patchelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the machine's index offers it, pip would run its build backend to read its metadata."""
    pins, ran = pinned.pins(), tmp_path / "ran"
    private_cache.mkdir(parents=True)
    (private_cache / "toolchain").symlink_to(patchelf.parents[2])
    backend = f"import pathlib; pathlib.Path({str(ran)!r}).touch()"
    project = '[build-system]\nrequires = []\nbuild-backend = "b"\nbackend-path = ["."]\n'
    index = tmp_path / "index"
    index.mkdir()
    top = pins.sdist_name.removesuffix(".tar.gz")
    with tarfile.open(index / pins.sdist_name, "w:gz") as tar:
        for name, text in (("pyproject.toml", project), ("b.py", backend), ("PKG-INFO", "")):
            entry = tarfile.TarInfo(f"{top}/{name}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(BuildError, match="DO NOT MATCH THE HASHES"):
        sdist.fetch(pins)
    assert not ran.exists()


def test_sources_that_do_not_name_their_llama_cpp_are_refused(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("top/README.md"))
    with pytest.raises(BuildError, match="does not say which llama.cpp it holds"):
        sdist.commit(archive)


def test_a_missing_sdist_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="there is no such file"):
        sdist.fetch(pinned.pins(), tmp_path / "absent.tar.gz")


def test_extract_drops_the_top_folder_and_what_is_not_wanted(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("top/kept/file", "top/docs/page", "top/docstring"):
            entry = tarfile.TarInfo(name)
            entry.size = 4
            tar.addfile(entry, io.BytesIO(b"data"))
    sdist.extract(archive, tmp_path / "out", without=("docs/",))
    found = {
        path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")
    }
    assert found == {"kept", "kept/file", "docstring"}
