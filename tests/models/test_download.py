"""Downloads against a real local server that speaks the hub's protocol."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.hub_server import COMMIT, OTHER_COMMIT, TOKEN, Hub, Repo, running_hub
from tests.models.samples import write_gguf, write_split
from worker.errors import DownloadError, ModelError
from worker.messages import Progress
from worker.models import hub as hub_calls
from worker.models import transfer
from worker.models.download import Downloaded, download
from worker.models.reference import HubReference, parse
from worker.models.resolve import resolve

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield running


@pytest.fixture
def gguf_bytes(tmp_path: Path) -> bytes:
    return write_gguf(tmp_path / "sample.gguf").read_bytes()


def fetch(ref: str, cache_dir: Path, sha256: str | None = None) -> tuple[Downloaded, list[Any]]:
    told: list[Progress] = []
    parsed = parse(ref)
    assert isinstance(parsed, HubReference)
    got = asyncio.run(download(parsed, cache_dir=cache_dir, sha256=sha256, on_progress=told.append))
    return got, told


def failure(ref: str, cache_dir: Path, sha256: str | None = None) -> DownloadError:
    with pytest.raises(DownloadError) as caught:
        fetch(ref, cache_dir, sha256)
    assert caught.value.exit_code == 6
    assert "\n" not in caught.value.message
    assert TOKEN not in caught.value.message + repr(caught.value.details)
    return caught.value


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


def test_the_storage_host_never_sees_the_token(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes}, private=True)
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert got.path.read_bytes() == gguf_bytes
    to_hub = [headers for path, headers in hub.bodies() if "/resolve/" in path]
    to_storage = [headers for path, headers in hub.bodies() if path.startswith("/blobs/")]
    assert to_hub and all(h["authorization"] == f"Bearer {TOKEN}" for h in to_hub)
    assert to_storage and not any("authorization" in h for h in to_storage)


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


def test_wrong_content_is_never_left_behind(hub: Hub, tmp_path: Path, gguf_bytes: bytes) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    hub.lie_about["m.gguf"] = "0" * 64
    error = failure("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert error.details["reason"] == "checksum"
    assert not list((tmp_path / "cache/hub").rglob("m.gguf*"))
    assert not [p for p in (tmp_path / "cache/hub").rglob("partial/*") if p.suffix != ".lock"]


def test_a_pin_of_the_registry_must_be_met(hub: Hub, tmp_path: Path, gguf_bytes: bytes) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    pin = hashlib.sha256(gguf_bytes).hexdigest()
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache", pin)
    assert got.path.read_bytes() == gguf_bytes
    hub.requests.clear()
    error = failure("hf:o/r::file=m.gguf", tmp_path / "cache", "1" * 64)
    assert error.details["reason"] == "checksum"
    assert hub.bodies() == [], "the hub's own hash contradicts the pin before any byte is fetched"


def test_small_files_are_verified_by_their_git_hash(hub: Hub, tmp_path: Path) -> None:
    hub.large_bytes = 2**40
    hub.repos["o/r"] = Repo({"m.gguf": b"GGUF" + bytes(100)})
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert got.path.stat().st_size == 104
    hub.lie_about["m.gguf"] = "0" * 40
    hub.repos["o/r"].branches["main"] = OTHER_COMMIT
    error = failure("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert error.details["reason"] == "checksum"


@pytest.mark.parametrize(
    ("status", "headers", "reason", "words"),
    [
        (401, {}, "unauthorized", "set HF_TOKEN"),
        (403, {}, "forbidden", "no access"),
        (403, {"X-Error-Code": "GatedRepo"}, "forbidden", "gated"),
        (404, {"X-Error-Code": "RepoNotFound"}, "not_found", "does not exist"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "not_found", "no such revision"),
        (404, {"X-Error-Code": "EntryNotFound"}, "not_found", "has no file 'm.gguf'"),
        (429, {"Retry-After": "600"}, "rate_limited", "in 600 s"),
        (429, {"RateLimit": '"api";r=0;t=55'}, "rate_limited", "in 55 s"),
    ],
)
def test_final_answers_are_told_apart_at_once(
    hub: Hub, tmp_path: Path, status: int, headers: dict[str, str], reason: str, words: str
) -> None:
    hub.fail_with = (status, headers)
    started = time.monotonic()
    error = failure("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert error.details["reason"] == reason
    assert words in error.message
    assert len(hub.requests) == 1 and time.monotonic() - started < 5


def test_passing_faults_are_tried_again(hub: Hub, tmp_path: Path, gguf_bytes: bytes) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    hub.fail_with, hub.fail_times = (503, {}), 1
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert got.path.read_bytes() == gguf_bytes


def test_missing_and_forbidden_repositories(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/gated"] = Repo({"m.gguf": gguf_bytes}, gated=True)
    cache = tmp_path / "cache"
    assert failure("hf:o/gated::file=m.gguf", cache).details["reason"] == "forbidden"
    assert failure("hf:o/nothing::file=m.gguf", cache).details["reason"] == "unauthorized"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert failure("hf:o/gated@v9::file=m.gguf", cache).details["reason"] == "not_found"
    assert failure("hf:o/gated::file=n.gguf", cache).details["reason"] == "not_found"
    assert fetch("hf:o/gated::file=m.gguf", cache)[0].path.read_bytes() == gguf_bytes


def test_no_server_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub_calls, "ATTEMPTS", 1)
    error = failure("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert error.details["reason"] == "network"
    assert "no connection" in error.message


def test_a_server_that_is_no_hub(hub: Hub, tmp_path: Path, gguf_bytes: bytes) -> None:
    hub.fail_with = (200, {})
    error = failure("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert error.details["reason"] == "network"
    assert "HF_ENDPOINT" in error.message


def test_offline_mode_calls_nobody(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert again == got
    error = failure("hf:o/r::file=other.gguf", tmp_path / "cache")
    assert error.details["reason"] == "offline"
    assert failure("hf:o/other", tmp_path / "cache").details["reason"] == "offline"
    assert hub.requests == []


def test_a_full_disk_is_told_with_both_numbers(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    monkeypatch.setattr(transfer, "DISK_RESERVE_BYTES", 2**62)
    error = failure("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert error.details["reason"] == "disk_full"
    assert error.details["needed_bytes"] == len(gguf_bytes)
    assert error.details["available_bytes"] > 0
    assert hub.bodies() == []


def test_a_disk_that_fills_up_mid_way(hub: Hub, tmp_path: Path) -> None:
    """The file size limit of a child process ends the writing as a full disk does."""
    content = os.urandom(3 * 2**20)
    hub.repos["o/r"] = Repo({"m.gguf": content})
    script = (
        "import asyncio, pathlib, resource, signal, sys\n"
        "from worker.errors import DownloadError\n"
        "from worker.models.download import download\n"
        "from worker.models.reference import HubReference\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
        "try:\n"
        "    asyncio.run(download(HubReference('o/r', None, 'm.gguf'),\n"
        "        cache_dir=pathlib.Path(sys.argv[1]), sha256=None, on_progress=lambda p: None))\n"
        "except DownloadError as error:\n"
        "    print(error.details['reason'], error.message)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "cache")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.stdout.startswith("disk_full The disk is full"), told.stderr
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert got.path.read_bytes() == content


def test_all_parts_of_a_split_model(hub: Hub, tmp_path: Path) -> None:
    parts = write_split(tmp_path, count=3)
    hub.large_bytes = 64
    hub.repos["o/r"] = Repo({f"q8/{p.name}": p.read_bytes() for p in parts})
    got, told = fetch(f"hf:o/r@{COMMIT}::file=q8/{parts[1].name}", tmp_path / "cache")
    assert got.path.name == parts[0].name
    assert [p.read_bytes() for p in sorted(got.path.parent.iterdir())] == [
        p.read_bytes() for p in parts
    ]
    percents = [p.percent for p in told if p.phase == "download"]
    assert percents == sorted(percents) and percents[-1] == 100.0
    hub.requests.clear()
    got.path.with_name(parts[2].name).unlink()
    fetch(f"hf:o/r@{COMMIT}::file=q8/{parts[0].name}", tmp_path / "cache")
    assert [path for path, _ in hub.bodies() if path.startswith("/blobs/")] == [
        f"/blobs/o/r/q8/{parts[2].name}?signature=xyz"
    ]


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


def test_the_hubs_own_cache_is_used_and_verified(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that another tool downloaded is not downloaded again, unless it is damaged."""
    store = tmp_path / "shared/models--o--r"
    blob = store / "blobs" / hashlib.sha256(gguf_bytes).hexdigest()
    link = store / "snapshots" / COMMIT / "m.gguf"
    for folder in (blob.parent, link.parent):
        folder.mkdir(parents=True)
    blob.write_bytes(gguf_bytes)
    link.symlink_to(blob)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "shared"))
    ref = f"hf:o/r@{COMMIT}::file=m.gguf"
    got, _ = fetch(ref, tmp_path / "cache")
    assert got.path == link and hub.requests == []
    blob.write_bytes(gguf_bytes[:-1] + b"!")
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    again, _ = fetch(ref, tmp_path / "cache")
    assert again.path != link and again.path.read_bytes() == gguf_bytes


# --- repositories without a file -----------------------------------------------------------


def test_a_sharded_checkpoint_is_fetched_by_its_index(hub: Hub, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    hub.repos["o/w"] = Repo(
        {
            "config.json": b"{}",
            "tokenizer.json": b"{}",
            "README.md": b"not needed",
            "model.safetensors.index.json": json.dumps(index).encode(),
            "model-1.safetensors": bytes(2000),
            "model-2.safetensors": bytes(3000),
            "consolidated.safetensors": bytes(9000),
            "onnx/model.safetensors": bytes(9000),
        }
    )
    got, _ = fetch("hf:o/w", tmp_path / "cache")
    assert got.is_folder
    assert sorted(p.name for p in got.path.iterdir()) == [
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    hub.requests.clear()
    assert fetch(f"hf:o/w@{COMMIT}", tmp_path / "cache")[0] == got
    assert hub.requests == []


def test_a_repository_of_ggufs_needs_a_file_unless_it_has_one(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes
) -> None:
    hub.repos["o/one"] = Repo({"README.md": b"", "m.gguf": gguf_bytes})
    hub.repos["o/two"] = Repo({"a.gguf": gguf_bytes, "b.gguf": gguf_bytes})
    hub.repos["o/none"] = Repo({"README.md": b""})
    hub.repos["o/bad"] = Repo({"config.json": b"", "model.safetensors.index.json": b"[]"})
    got, _ = fetch("hf:o/one", tmp_path / "cache")
    assert got.path.read_bytes() == gguf_bytes
    with pytest.raises(ModelError, match=r"name one, as in hf:o/two::file=a.gguf"):
        fetch("hf:o/two", tmp_path / "cache")
    with pytest.raises(ModelError, match="neither SafeTensors"):
        fetch("hf:o/none", tmp_path / "cache")
    with pytest.raises(ModelError, match="not an index of shards"):
        fetch("hf:o/bad", tmp_path / "cache")


def test_an_index_cannot_name_files_elsewhere(hub: Hub, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "../../evil.safetensors"}}
    hub.repos["o/w"] = Repo(
        {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()}
    )
    with pytest.raises(ModelError, match="odd shard"):
        fetch("hf:o/w", tmp_path / "cache")


# --- from the reference to the model -------------------------------------------------------


def test_resolve_takes_an_alias_to_a_checked_file(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes
) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes, "text.gguf": b"Once upon a time" * 100})
    models = tmp_path / "models.toml"
    models.write_text(
        f"[models.mine]\nrepo='o/r'\nfile='m.gguf'\n"
        f"sha256='{hashlib.sha256(gguf_bytes).hexdigest()}'\n"
        f"[models.wrong]\nrepo='o/r'\nfile='text.gguf'\n"
    )
    found = asyncio.run(resolve("mine", models_file=models, cache_dir=tmp_path / "c"))
    assert found.gguf_path.read_bytes() == gguf_bytes
    assert (found.model_ref, found.kind) == ("mine", "hub")
    with pytest.raises(ModelError, match="not a usable GGUF"):
        asyncio.run(resolve("wrong", models_file=models, cache_dir=tmp_path / "c"))


def test_the_token_is_never_logged(
    hub: Hub,
    tmp_path: Path,
    gguf_bytes: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes}, private=True)
    with caplog.at_level(logging.DEBUG):
        fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
        hub.fail_with = (403, {})
        failure("hf:o/r::file=n.gguf", tmp_path / "cache")
    said = capfd.readouterr()
    assert TOKEN not in caplog.text + said.out + said.err
