"""Downloads against a real local server that speaks the hub's protocol: caching and resuming."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.models.fetching import fetch
from tests.models.hub_server import COMMIT, OTHER_COMMIT, Hub, Repo
from worker.messages import Progress
from worker.models import hub as hub_calls
from worker.models.download import Downloaded, download
from worker.models.reference import HubReference

ROOT = Path(__file__).parents[2]


def test_a_file_is_fetched_verified_and_then_needs_no_network(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes
) -> None:
    hub.repos["o/r"] = Repo({"sub/m.gguf": gguf_bytes})
    ref = f"hf:o/r@{COMMIT}::file=sub/m.gguf"
    got, told = fetch(ref, tmp_path / "cache")
    assert got.path.read_bytes() == gguf_bytes
    assert got.commit == COMMIT and not got.is_folder
    assert told[-1] == Progress("download", 100.0)
    record = json.loads(
        next((tmp_path / "cache/hub").rglob("records/*/sub/m.gguf.json")).read_bytes()
    )
    assert record["sha256"] == hashlib.sha256(gguf_bytes).hexdigest()
    hub.requests.clear()
    again, _ = fetch(ref, tmp_path / "cache")
    assert again == got
    assert hub.requests == []


def test_a_branch_is_asked_for_each_time_and_its_new_commit_is_fetched(
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
    monkeypatch.setattr(hub_calls, "ATTEMPTS", 1)
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    first, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    hub.fail_with = (status, {})
    again, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert again == first


def test_a_cut_connection_is_resumed_within_the_download(hub: Hub, tmp_path: Path) -> None:
    content = os.urandom(14 * 2**20)
    hub.repos["o/r"] = Repo({"m.gguf": content})
    hub.cut_after_bytes, hub.cut_times = 11 * 2**20, 1
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert got.path.read_bytes() == content
    ranges = [h.get("range") for path, h in hub.bodies() if path.startswith("/blobs/")]
    assert ranges[0] is None and len(ranges) == 2
    assert ranges[1] is not None and int(ranges[1][6:-1]) >= 10 * 2**20


def test_a_killed_download_resumes_where_it_was(hub: Hub, tmp_path: Path) -> None:
    """The whole process is killed mid-way; the next one asks for the missing part alone."""
    content = os.urandom(22 * 2**20)
    hub.repos["o/r"] = Repo({"m.gguf": content})
    hub.chunk_delay_seconds = 0.05
    script = (
        "import asyncio, sys, pathlib; from worker.models.download import download;"
        "from worker.models.reference import HubReference;"
        "asyncio.run(download(HubReference('o/r', None, 'm.gguf'),"
        " cache_dir=pathlib.Path(sys.argv[1]), sha256=None, on_progress=print))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "cache")],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    partials = tmp_path / "cache/hub/models--o--r/partial"
    try:
        deadline = time.monotonic() + 30
        have = 0
        while have < 10 * 2**20 and time.monotonic() < deadline:
            time.sleep(0.02)
            have = max((p.stat().st_size for p in partials.glob("*") if p.is_file()), default=0)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert 10 * 2**20 <= have < len(content)
    assert not list((tmp_path / "cache/hub").rglob("snapshots/*/m.gguf"))
    hub.requests.clear()
    hub.chunk_delay_seconds = 0
    got, told = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert got.path.read_bytes() == content
    (asked,) = [h.get("range") for path, h in hub.bodies() if path.startswith("/blobs/")]
    assert asked is not None and int(asked[6:-1]) >= 10 * 2**20
    assert not [p for p in partials.iterdir() if p.suffix != ".lock"]
    assert max(p.percent for p in told) == 100.0


def test_a_server_without_ranges_costs_a_whole_download_not_a_broken_file(
    hub: Hub, tmp_path: Path
) -> None:
    content = os.urandom(2**20)
    hub.repos["o/r"] = Repo({"m.gguf": content})
    partial = tmp_path / "cache/hub/models--o--r/partial" / hashlib.sha256(content).hexdigest()
    partial.parent.mkdir(parents=True)
    partial.write_bytes(content[:1000])
    hub.ignore_ranges = True
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert got.path.read_bytes() == content


@pytest.mark.parametrize("garbage_bytes", [1000, 2**20, 2**20 + 5])
def test_a_damaged_partial_file_is_thrown_away(
    hub: Hub, tmp_path: Path, garbage_bytes: int
) -> None:
    content = os.urandom(2**20)
    hub.repos["o/r"] = Repo({"m.gguf": content})
    partial = tmp_path / "cache/hub/models--o--r/partial" / hashlib.sha256(content).hexdigest()
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * garbage_bytes)
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


def test_two_workers_download_once(hub: Hub, tmp_path: Path) -> None:
    content = os.urandom(3 * 2**20)
    hub.repos["o/r"] = Repo({"m.gguf": content})
    hub.chunk_delay_seconds = 0.1
    ref = HubReference("o/r", None, "m.gguf")

    async def both() -> list[Downloaded]:
        return await asyncio.gather(
            *(
                download(ref, cache_dir=tmp_path / "c", sha256=None, on_progress=lambda p: None)
                for _ in range(2)
            )
        )

    first, second = asyncio.run(both())
    assert first == second and first.path.read_bytes() == content
    assert len([path for path, _ in hub.bodies() if path.startswith("/blobs/")]) == 1


def test_a_cancelled_download_stops_soon_and_resumes(hub: Hub, tmp_path: Path) -> None:
    content = os.urandom(16 * 2**20)
    hub.repos["o/r"] = Repo({"m.gguf": content})
    hub.chunk_delay_seconds = 0.05
    ref = HubReference("o/r", None, "m.gguf")

    async def cancelled() -> float:
        task = asyncio.create_task(
            download(ref, cache_dir=tmp_path / "c", sha256=None, on_progress=lambda p: None)
        )
        await asyncio.sleep(0.4)
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - started

    assert asyncio.run(cancelled()) < 2
    hub.chunk_delay_seconds = 0
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "c")
    assert got.path.read_bytes() == content
