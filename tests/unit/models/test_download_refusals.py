"""Downloads that must fail, and secrets that must not leak: each refusal has its own message."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants

from tests import ROOT
from tests.support import clock
from tests.support.fetching import failure, fetch
from tests.support.hub import set_endpoint
from tests.support.hub_server import COMMIT, OTHER_COMMIT, TOKEN, Hub, Repo
from worker.models.hub import remote, transfer


def test_the_storage_host_never_sees_the_token(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes}, private=True)
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert got.path.read_bytes() == gguf_bytes
    to_hub = [headers for path, headers in hub.bodies("HEAD") if "/resolve/" in path]
    to_storage = [headers for path, headers in hub.bodies() if path.startswith("/blobs/")]
    assert to_hub and all(h["authorization"] == f"Bearer {TOKEN}" for h in to_hub)
    assert to_storage and not any("authorization" in h for h in to_storage)


def test_wrong_content_is_never_left_behind(hub: Hub, tmp_path: Path, gguf_bytes: bytes) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    hub.lie_about["m.gguf"] = "0" * 64
    error = failure("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert error.details["reason"] == "checksum"
    assert not list((tmp_path / "cache/hub").rglob("m.gguf*"))
    assert not list((tmp_path / "cache/hub").rglob("blobs/*"))


@pytest.mark.parametrize("size_mib", [1, 11])
def test_a_file_longer_than_announced_ends_at_the_announced_size(
    hub: Hub, tmp_path: Path, size_mib: int
) -> None:
    """Below and above the size from which a download is resumed."""
    content = os.urandom(size_mib * 2**20)
    hub.repos["o/r"] = Repo({"m.gguf": content})
    hub.stored_instead["m.gguf"] = content + bytes(40 * 2**20)
    error = failure("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert error.details["reason"] == "checksum" and f"the {len(content)} bytes" in error.message
    blobs = (tmp_path / "cache/hub").rglob("blobs/*")
    assert sum(path.stat().st_size for path in blobs) <= len(content)


def test_a_pin_of_the_registry_must_be_met(hub: Hub, tmp_path: Path, gguf_bytes: bytes) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    pin = hashlib.sha256(gguf_bytes).hexdigest()
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache", pin)
    assert got.path.read_bytes() == gguf_bytes
    hub.requests.clear()
    error = failure("hf:o/r::file=m.gguf", tmp_path / "cache", "1" * 64)
    assert error.details["reason"] == "checksum"
    assert hub.bodies() == [], "the hub's own hash contradicts the pin before any byte is fetched"


@pytest.mark.parametrize(
    "name", ["../../evil.gguf", "/evil.gguf", "a/./b.gguf", "a\\b.gguf", "a/c:b.gguf"]
)
def test_a_listing_cannot_name_files_elsewhere(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.repos["o/r"] = Repo({name: b"GGUF" + bytes(100)})
    error = failure("hf:o/r", tmp_path / "a/b/cache")
    assert error.details["reason"] == "listing" and repr(name) in error.message
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


EVIL = "../../../../evil"


@pytest.mark.parametrize(
    ("ref", "etag", "commit"),
    [
        ("hf:o/r::file=m.gguf", EVIL, COMMIT),
        ("hf:o/r::file=m.gguf", "..", COMMIT),
        ("hf:o/r::file=m.gguf", "1" * 40, EVIL),
        ("hf:o/r", "1" * 40, EVIL),
    ],
)
def test_neither_an_etag_nor_a_commit_can_name_files_elsewhere(
    hub: Hub, tmp_path: Path, ref: str, etag: str, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ATTEMPTS", 1)
    hub.repos["o/r"] = Repo({"m.gguf": b"GGUF" + bytes(100)}, branches={"main": commit})
    hub.lie_about["m.gguf"] = etag
    assert "does not speak the hub's protocol" in failure(ref, tmp_path / "a/b/cache").message
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


NO_LISTINGS = [
    "<html>Please log in",
    "[]",
    '{"error": "no"}',
    '{"id": "o/r", "sha": "1", "siblings": [null]}',
    '{"id": "o/r", "sha": "1", "siblings": [{"rfilename": 5}]}',
    '{"id": "o/r", "sha": "1", "siblings": [{"rfilename": "m.gguf", "size": -1}]}',
]
NO_WAITS = ["9" * 400, "²", "-1", "soon"]


@pytest.mark.parametrize(
    ("answers", "reason", "words"),
    [
        *(({"listing": each.encode()}, "network", "check HF_ENDPOINT") for each in NO_LISTINGS),
        ({"fail_with": (200, {})}, "network", "HF_ENDPOINT"),
        ({"size": "-5"}, "network", "check HF_ENDPOINT"),
        *(
            ({"fail_with": (429, {"Retry-After": each})}, "rate_limited", "try again later")
            for each in NO_WAITS
        ),
    ],
)
def test_invalid_answers_of_a_hub_are_reported(
    hub: Hub,
    tmp_path: Path,
    gguf_bytes: bytes,
    answers: dict[str, Any],
    reason: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "ATTEMPTS", 1)
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes + bytes(2048)})
    for name, value in answers.items():
        setattr(hub, name, value)
    error = failure("hf:o/r" if "listing" in answers else "hf:o/r::file=m.gguf", tmp_path / "cache")
    assert error.details["reason"] == reason and words in error.message
    assert hub.bodies() == []


def test_a_cache_that_cannot_be_written_is_not_reported_as_a_network_fault(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes
) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    blobs = tmp_path / "cache/hub/models--o--r/blobs"
    blobs.parent.mkdir(parents=True)
    blobs.write_text("a file")
    error = failure("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert error.details["reason"] == "cache"
    assert "could not be stored: File exists" in error.message and "--cache-dir" in error.message


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
        (403, {}, "forbidden", "check the repository's page, HF_TOKEN and the proxy"),
        (403, {"X-Error-Code": "GatedRepo"}, "forbidden", "gated"),
        (404, {"X-Error-Code": "RepoNotFound"}, "not_found", "does not exist"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "not_found", "no such revision"),
        (404, {"X-Error-Code": "EntryNotFound"}, "not_found", "has no such file"),
        (429, {"Retry-After": "600"}, "rate_limited", "in 600 s"),
        (429, {"RateLimit": '"api";r=0;t=55'}, "rate_limited", "in 55 s"),
    ],
)
def test_final_errors_are_distinguished_and_not_retried(
    hub: Hub, tmp_path: Path, status: int, headers: dict[str, str], reason: str, words: str
) -> None:
    hub.fail_with = (status, headers)
    started = time.monotonic()
    error = failure("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert error.details["reason"] == reason
    assert words in error.message
    assert len(hub.requests) == 1 and clock.in_time(started, 30)


def test_temporary_faults_are_retried(hub: Hub, tmp_path: Path, gguf_bytes: bytes) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    hub.fail_with, hub.fail_times = (503, {}), 1
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert got.path.read_bytes() == gguf_bytes


def test_a_missing_server_is_reported_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub
) -> None:
    set_endpoint(monkeypatch, "http://me:secret@127.0.0.1:9")
    monkeypatch.setattr(remote, "ATTEMPTS", 1)
    error = failure("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert error.details["reason"] == "network"
    why = "ConnectError: [Errno 111] Connection refused (in the environment: "
    assert f"no connection to http://127.0.0.1:9: {why}" in error.message


def test_a_storage_that_cannot_be_reached_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub, gguf_bytes: bytes
) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    hub.storage_url = "http://localhost:9"
    monkeypatch.setattr(remote, "ATTEMPTS", 1)
    error = failure("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert error.details["reason"] == "network"
    assert "no connection to http://localhost:9: ConnectError" in error.message


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("ALL_PROXY", "socks5://user:secret@127.0.0.1:9", "SOCKS"),
        ("http_proxy", "http://user:secret@[::1", "InvalidURL"),
        ("HTTPS_PROXY", "ftp://user:secret@127.0.0.1", "Unknown scheme"),
        ("SSL_CERT_FILE", "/none", "FileNotFoundError"),
    ],
)
def test_a_wrong_variable_for_connections_is_named(
    variable: str, value: str, why: str, hub: Hub, tmp_path: Path, gguf_bytes: bytes
) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.upper().endswith("_PROXY"):
                patch.delenv(name)
        patch.setenv(variable, value)
        close_session()
        error = failure("hf:o/r", tmp_path / "other")
        again, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert why in error.message and variable in error.message
    assert error.details["reason"] == "network" and "secret" not in error.message
    assert again == got, "what is here needs no connection"


def test_an_endless_redirect_is_reported(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ATTEMPTS", 1)
    hub.fail_with = (302, {"Location": f"{hub.url}/o/r/resolve/main/m.gguf"})
    for reference in ("hf:o/r::file=m.gguf", "hf:o/r"):
        error = failure(reference, tmp_path / "cache")
        assert error.details["reason"] == "network"
        assert "without end; check HF_ENDPOINT and the proxy" in error.message


def test_offline_mode_sends_no_requests(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert again == got
    error = failure("hf:o/r::file=other.gguf", tmp_path / "cache")
    assert error.details["reason"] == "offline"
    assert failure("hf:o/other", tmp_path / "cache").details["reason"] == "offline"
    assert hub.requests == []


def test_a_full_disk_is_reported_with_both_numbers(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    monkeypatch.setattr(transfer, "DISK_RESERVE_BYTES", 2**62)
    error = failure("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert error.details["reason"] == "disk_full"
    assert error.details["needed_bytes"] == len(gguf_bytes)
    assert error.details["available_bytes"] > 0
    assert hub.bodies() == []


def test_a_disk_that_fills_up_midway_is_reported(hub: Hub, tmp_path: Path) -> None:
    """The file size limit of a child process acts like a full disk."""
    content = os.urandom(3 * 2**20)
    hub.repos["o/r"] = Repo({"m.gguf": content})
    script = (
        "import pathlib, resource, signal, sys\n"
        "from tests.support.fetching import failure\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
        "error = failure('hf:o/r::file=m.gguf', pathlib.Path(sys.argv[1]))\n"
        "print(error.details['reason'], error.message)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "cache")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.stdout.startswith("disk_full "), child.stderr
    assert "the disk is full" in child.stdout
    got, _ = fetch("hf:o/r::file=m.gguf", tmp_path / "cache")
    assert got.path.read_bytes() == content


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
    output = capfd.readouterr()
    assert TOKEN not in caplog.text + output.out + output.err
