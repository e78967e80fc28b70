"""Downloads against a real local server that speaks the hub's protocol: caching and resuming."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download

from tests import ROOT
from tests.support.fetching import failure, fetch, fetching
from tests.support.hub_server import COMMIT, OTHER_COMMIT, Hub, Repo
from worker.errors import DownloadError
from worker.models.hub import remote
from worker.models.hub.download import Downloaded
from worker.models.hub.remote import RemoteFile
from worker.models.hub.transfer import Transfer
from worker.wire.messages import Progress


def partial_of(tmp_path: Path, content: bytes) -> Path:
    """Return the path of a partial file."""
    name = f"{hashlib.sha256(content).hexdigest()}.incomplete"
    partial = tmp_path / "cache/hub/models--o--r/blobs" / name
    partial.parent.mkdir(parents=True)
    return partial


def test_a_file_is_fetched_verified_and_then_needs_no_network(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes
) -> None:
    hub.repos["o/r"] = Repo({"sub/m.gguf": gguf_bytes})
    ref = f"hf:o/r@{COMMIT}::file=sub/m.gguf"
    got, progress = fetch(ref, tmp_path / "cache")
    assert got.path.read_bytes() == gguf_bytes
    assert got.commit == COMMIT and got.path.is_file()
    assert progress[-1] == Progress("download", 100.0, total_bytes=len(gguf_bytes))
    assert got.path.resolve().name == hashlib.sha256(gguf_bytes).hexdigest()
    hub.requests.clear()
    again, _ = fetch(ref, tmp_path / "cache")
    assert again == got
    assert hub.requests == []


def test_a_branch_is_checked_each_time_and_its_new_commit_is_fetched(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes
) -> None:
    repo = hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    first, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    hub.requests.clear()
    fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert [verb for verb, _, _ in hub.requests] == ["HEAD"]
    repo.branches["main"] = OTHER_COMMIT
    repo.files["m.gguf"] = gguf_bytes + b"\0" * 32
    second, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert (first.commit, second.commit) == (COMMIT, OTHER_COMMIT)
    assert second.path.read_bytes() == repo.files["m.gguf"]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_cached_branch_serves_while_the_hub_cannot_answer(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ATTEMPTS", 1)
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    first, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    hub.fail_with = (status, {})
    again, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert again == first


def test_a_cache_that_cannot_be_written_serves_what_it_has(hub: Hub, tmp_path: Path) -> None:
    content = b"GGUF" + bytes(11 * 2**20)
    hub.repos["o/r"] = Repo({"m.gguf": content})
    cache = tmp_path / "cache"
    first, _ = fetch("hf:o/r", cache)
    for name in (".locks", "models--o--r/files"):  # a file blocks the path, also for root
        shutil.rmtree(cache / "hub" / name)
        (cache / "hub" / name).write_text("a file")
    hub.requests.clear()
    assert fetch("hf:o/r", cache)[0] == first and not hub.bodies(), "nothing is missing"
    hub.repos["o/r"] = Repo({"m.gguf": content + b"1"}, branches={"main": OTHER_COMMIT})
    assert fetch("hf:o/r::file=m.gguf", cache)[0] == first


def test_a_cache_on_a_file_system_without_locks_is_named_as_such(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_file: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    hub.repos["o/r"] = Repo({"m.gguf": b"GGUF"})
    with pytest.raises(DownloadError, match="cannot be used: its file system has no file locks"):
        fetch("hf:o/r::file=m.gguf", tmp_path)


def test_another_user_can_read_all_of_a_cache(hub: Hub, tmp_path: Path, gguf_bytes: bytes) -> None:
    """For example if an image contains the model and its worker runs as another user."""
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    before = os.umask(0o022)
    try:
        fetch("hf:o/r", tmp_path / "cache")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} >= {"refs", "files", "hashes", "blobs"}
    assert [path for path in files if path.stat().st_mode & 0o044 != 0o044] == []


def test_a_model_in_the_users_cache_needs_no_writable_cache(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes
) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    users = hf_hub_download("o/r", "m.gguf")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/hub").write_text("a file")
    for ref in ("hf:o/r", "hf:o/r::file=m.gguf"):
        assert fetch(ref, tmp_path / "cache")[0].path == Path(users)


def test_a_cut_connection_is_resumed_within_the_download(hub: Hub, tmp_path: Path) -> None:
    content = os.urandom(14 * 2**20)
    hub.repos["o/r"] = Repo({"m.gguf": content})
    hub.cut_after_bytes, hub.cut_times = 11 * 2**20, 1
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert got.path.read_bytes() == content
    ranges = [h.get("range") for path, h in hub.bodies() if path.startswith("/blobs/")]
    assert ranges[0] is None and len(ranges) == 2
    assert ranges[1] is not None and int(ranges[1][6:-1]) >= 10 * 2**20


OURS = (
    "import sys, pathlib; from tests.support.fetching import fetch;"
    "fetch('hf:o/r::file=m.gguf', pathlib.Path(sys.argv[1]))"
)
THE_LIBRARYS = (
    "import sys; from huggingface_hub import hf_hub_download;"
    "hf_hub_download('o/r', 'm.gguf', cache_dir=f'{sys.argv[1]}/hub')"
)


def kill_midway(script: str, hub: Hub, tmp_path: Path, content: bytes) -> Path:
    """Kill a download's process when 10 MiB are on the disk; returns the folder of blobs."""
    hub.repos["o/r"] = Repo({"m.gguf": content})
    hub.chunk_delay_seconds = 0.1
    cache = tmp_path / "cache"
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(cache)], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    blobs = cache / "hub/models--o--r/blobs"
    try:
        deadline = time.monotonic() + 120
        have = 0
        while have < 10 * 2**20 and time.monotonic() < deadline:
            time.sleep(0.02)
            have = max((p.stat().st_size for p in blobs.glob("*.incomplete")), default=0)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert 10 * 2**20 <= have < len(content)
    assert not list((cache / "hub").rglob("snapshots/*/m.gguf"))
    hub.requests.clear()
    hub.chunk_delay_seconds = 0
    return blobs


def test_a_killed_download_resumes_where_it_was(hub: Hub, tmp_path: Path) -> None:
    """The whole process is killed midway; the next one requests only the missing part."""
    content = os.urandom(22 * 2**20)
    blobs = kill_midway(OURS, hub, tmp_path, content)
    got, progress = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert got.path.read_bytes() == content
    (requested,) = [h.get("range") for path, h in hub.bodies() if path.startswith("/blobs/")]
    assert requested is not None and int(requested[6:-1]) >= 10 * 2**20
    assert [p.name for p in blobs.iterdir()] == [hashlib.sha256(content).hexdigest()]
    percents = [p.percent for p in progress if p.phase == "download"]
    assert percents[0] > 40 and percents[-1] == 100.0


def test_the_library_itself_does_not_resume(hub: Hub, tmp_path: Path) -> None:
    """This is why `hub/transfer` exists: when this test fails, `hf_hub_download` alone is
    enough."""
    kill_midway(THE_LIBRARYS, hub, tmp_path, os.urandom(22 * 2**20))
    hf_hub_download("o/r", "m.gguf", cache_dir=tmp_path / "cache/hub")
    assert [h.get("range") for path, h in hub.bodies() if path.startswith("/blobs/")] == [None]


def test_a_branch_that_moves_while_the_storage_fails_keeps_the_old_snapshot(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub names the new commit, but its storage fails: the old files are used, online and
    offline, until the new ones are complete."""
    repo = hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    first, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    repo.branches["main"] = OTHER_COMMIT
    repo.files["m.gguf"] = gguf_bytes + bytes(11 * 2**20)
    hub.storage_fails = True
    assert fetch("hf:o/r::file=m.gguf", tmp_path / "cache")[0] == first
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert fetch("hf:o/r::file=m.gguf", tmp_path / "cache")[0] == first
    hub.storage_fails = False
    second, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert second.commit == OTHER_COMMIT and second.path.read_bytes() == repo.files["m.gguf"]


@pytest.mark.parametrize("garbage_bytes", [0, 1000, 11 * 2**20, 11 * 2**20 + 5])
def test_a_partial_file_that_cannot_be_continued_is_discarded(
    hub: Hub, tmp_path: Path, garbage_bytes: int
) -> None:
    """Because it is damaged, or the server does not support ranges."""
    content = os.urandom(11 * 2**20)
    hub.repos["o/r"] = Repo({"m.gguf": content})
    hub.ignore_ranges = garbage_bytes == 0
    partial_of(tmp_path, content).write_bytes(b"x" * garbage_bytes or content[: 6 * 2**20])
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert got.path.read_bytes() == content


def test_a_partial_file_longer_than_the_storages_is_discarded(hub: Hub, tmp_path: Path) -> None:
    """The hub announces more than its storage has, so the storage refuses the range (416)."""
    content = os.urandom(11 * 2**20)
    hub.repos["o/r"] = Repo({"m.gguf": content})
    hub.stored_instead["m.gguf"] = content[: 10 * 2**20]
    partial_of(tmp_path, content).write_bytes(content[:-1000])
    error = failure("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert error.details["reason"] == "network" and "not be downloaded completely" in error.message
    ranges = [h.get("range") for path, h in hub.bodies() if path.startswith("/blobs/")]
    assert ranges == [f"bytes={len(content) - 1000}-", None]
    hub.stored_instead.clear()
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert got.path.read_bytes() == content


def test_a_damaged_cached_file_is_fetched_again(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes
) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    ref = f"hf:o/r@{COMMIT}::file=m.gguf"
    got, _ = fetch(ref, tmp_path / "cache")
    got.path.write_bytes(gguf_bytes[:-1] + b"!")
    again, _ = fetch(ref, tmp_path / "cache")
    assert again.path.read_bytes() == gguf_bytes


@pytest.mark.parametrize("names", [["m.gguf"], ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]])
def test_an_incomplete_copy_is_fetched_again(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If links are not possible, the library copies a blob to its place."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
    hub.repos["o/r"] = Repo(dict.fromkeys(names, gguf_bytes))
    got, _ = fetch(f"hf:o/r::file={names[0]}", tmp_path / "cache")
    last = got.path.with_name(names[-1])
    assert not last.is_symlink()
    os.truncate(last, 100)
    again, _ = fetch(f"hf:o/r::file={names[0]}", tmp_path / "cache")
    assert last.read_bytes() == gguf_bytes
    hub.requests.clear()
    assert fetch(f"hf:o/r::file={names[0]}", tmp_path / "cache")[0] == again and not hub.bodies()


@pytest.mark.parametrize("size", [300, 3 << 20])
def test_a_damaged_blob_of_another_commit_is_fetched_again(
    hub: Hub, tmp_path: Path, size: int
) -> None:
    content = b"GGUF" + os.urandom(size)
    hub.repos["o/r"] = Repo({"m.gguf": content, "README.md": b"1"})
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    os.truncate(got.path.resolve(), size // 2)
    files = {"m.gguf": content, "README.md": b"2"}
    hub.repos["o/r"] = Repo(files, branches={"main": OTHER_COMMIT})
    again, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert again.commit == OTHER_COMMIT and again.path.read_bytes() == content


def test_two_workers_download_once(hub: Hub, tmp_path: Path) -> None:
    content = os.urandom(3 * 2**20)
    hub.repos["o/r"] = Repo({"m.gguf": content})
    hub.chunk_delay_seconds = 0.1

    async def both() -> list[Downloaded]:
        return await asyncio.gather(
            *(fetching("hf:o/r::file=m.gguf", tmp_path / "c") for _ in range(2))
        )

    first, second = asyncio.run(both())
    assert first == second and first.path.read_bytes() == content
    assert len([path for path, _ in hub.bodies() if path.startswith("/blobs/")]) == 1


def test_a_file_that_another_worker_fetches_meanwhile_is_not_fetched_again(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes
) -> None:
    """It may already be loading the file."""
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    with pytest.MonkeyPatch.context() as patch:

        def meanwhile(transfer: Transfer, files: Sequence[RemoteFile]) -> None:
            patch.undo()
            fetch("hf:o/r", tmp_path / "cache")
            transfer._check_disk(files)

        patch.setattr(Transfer, "_check_disk", meanwhile)
        got, _ = fetch("hf:o/r", tmp_path / "cache")
    assert got.path.read_bytes() == gguf_bytes
    assert len([path for path, _ in hub.bodies() if path.startswith("/blobs/")]) == 1


def test_a_cancelled_download_stops_soon_and_resumes(hub: Hub, tmp_path: Path) -> None:
    content = os.urandom(16 * 2**20)
    hub.repos["o/r"] = Repo({"m.gguf": content})
    hub.chunk_delay_seconds = 2.0  # half a minute in all

    async def cancelled() -> float:
        task = asyncio.create_task(fetching("hf:o/r::file=m.gguf", tmp_path / "c"))
        while not any(path.startswith("/blobs/") for path, _ in hub.bodies()):
            await asyncio.sleep(0.02)
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - started

    assert asyncio.run(cancelled()) < 15, "a chunk, or a tenth of a second"
    hub.chunk_delay_seconds = 0
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "c")
    assert got.path.read_bytes() == content
