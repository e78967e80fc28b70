"""File trouble: caches and stores on disks that are full or read-only, models that change."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartWorker
from tests.support.bundled import bundled_gguf
from tests.support.commands import DEAF, diagnose, loaded, start_refused
from tests.support.disk import MountRefused, mounted, remount
from tests.support.worker import installed, until
from worker.commands import convert
from worker.errors import ModelError
from worker.models.resolve import resolve

Mount = Callable[..., Path]
LOOKS_OFTEN = """\
from worker.supervisor import supervisor
supervisor.RESIDENCY_SECONDS = 0.5
from worker.cli import cpu
cpu()
"""
"""The installed command, which would otherwise check its model every quarter of a minute."""
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """`mount("size=1m")`: a file system in memory."""
    with ExitStack() as mounts:

        def make(options: str) -> Path:
            folder = tmp_path / f"disk-{len(list(tmp_path.glob('disk-*')))}"
            try:
                mounts.enter_context(mounted(folder, options))
            except MountRefused:
                pytest.skip("only root may mount")
            return folder

        yield make


def model_in(folder: Path) -> Path:
    return Path(shutil.copy(bundled_gguf(), folder / "model.gguf"))


# --- the cache ---


@pytest.mark.parametrize(
    ("options", "why", "words"),
    [
        ("size=1m", "bytes free", "0.0 GiB free"),
        ("ro", "Read-only file system", "cannot be written to"),
    ],
)
def test_a_full_or_read_only_cache_is_refused_and_keeps_no_file(
    mount: Mount, options: str, why: str, words: str
) -> None:
    """`told`: the doctor's message."""
    cache = mount(options)
    (check,) = [each for each in diagnose(cache, DEAF).checks if each.name == "cache"]
    assert check.status == "failed" and words in check.text
    with pytest.raises(ModelError, match=why):
        asyncio.run(resolve(loaded(cache), None))
    assert [path for path in cache.rglob("*.gguf")] == []


# --- the store ---


def test_a_store_that_is_full_or_read_only_costs_no_request(
    mount: Mount, start_worker: StartWorker
) -> None:
    store = mount("size=16k")
    worker = start_worker("--kv-store", str(store))
    for number in range(3):
        assert worker.execute(f"{number} " + "Once upon a time " * 40, max_tokens=3).end
    assert "No space left" in worker.wait_log("kv_store.write_failed")["reason"]
    remount(store, "ro,size=64m")
    assert len(worker.logs("kv_store.write_failed")) == 1, "once, and not for each request"
    assert worker.execute("Another one upon a time " * 40, max_tokens=3).end
    assert "Read-only" in worker.wait_log("kv_store.write_failed", 2)["reason"]
    remount(store, "rw,size=64m")
    assert worker.execute("A third upon a time " * 40, max_tokens=3).end
    until(lambda: list(store.glob("*.kv*")), lambda: worker.stderr)
    assert worker.logs("engine.crashed") == []


def test_an_unusable_store_is_refused_at_the_start(
    mount: Mount, warm_cache: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for store in (mount("ro") / "store", file / "store", file, shared):
        report = diagnose(warm_cache, DEAF, kv_store=str(store))
        (check,) = [each for each in report.checks if each.name == "kv store"]
        assert report.exit_code == 2 and "--kv-store" in check.text
    assert "chmod 700" in check.text, "of the folder that others may write to"
    assert start_refused(warm_cache, kv_store=str(shared)).message == check.text
    fresh = tmp_path / "a" / "b"
    assert diagnose(warm_cache, kv_store=str(fresh)).exit_code == 0
    assert not fresh.parent.exists(), "a diagnosis makes nothing"


# --- the model ---


def test_a_model_that_is_replaced_is_served_to_the_engines_end(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    model = model_in(tmp_path)
    worker = start_worker("--model", str(model))
    before = worker.execute("Once", **GREEDY).ids
    other = tmp_path / "other.gguf"
    shutil.copy(bundled_gguf("f16"), other)
    other.rename(model)
    assert worker.execute("Once", **GREEDY).ids == before
    worker.replace_engine()
    assert worker.execute("Once", **GREEDY).end
    assert worker.get("/info").json()["model"]["quant_kind"] == "F16"


def test_a_model_that_is_written_to_is_no_longer_served(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    model = model_in(tmp_path)
    command = [sys.executable, "-c", LOOKS_OFTEN]
    worker = start_worker("--model", str(model), command=command)
    with model.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))
    lost = worker.wait_log("residency.lost")
    assert "model.gguf was written to while it was served" in lost["message"]
    assert worker.wait() == 5


def test_a_model_that_is_cut_ends_the_worker_with_a_sentence(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    model = model_in(tmp_path)
    worker = start_worker("--model", str(model), "--crash-limit", "2")
    os.truncate(model, model.stat().st_size // 2)
    worker.post("/v1/inference", {"prompt": "Once", **GREEDY})
    assert worker.wait() == 8
    crashes = worker.logs("engine.crashed")
    assert "a mapped file was truncated" in crashes[0]["how"]
    assert "model.gguf" in crashes[-1]["error"]
    assert "model.gguf" in worker.stderr.splitlines()[-1]


def test_the_model_of_a_running_worker_is_not_removed(
    start_worker: StartWorker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    worker = start_worker(cache_dir=cache)
    (converted,) = (cache / "converted").iterdir()
    remove = ["cache", "--cache-dir", str(cache), "--remove", converted.name]
    assert convert.run(remove) == 3
    assert "running worker" in capsys.readouterr().err
    os.utime(converted, (0, 0))
    assert convert.run(["cache", "--cache-dir", str(cache), "--older-than", "2"]) == 0
    worker.replace_engine()  # it finds its file
    worker.kill()
    assert convert.run(remove) == 0 and not converted.exists()


# --- descriptors ---


def test_idle_connections_do_not_use_up_the_descriptors(start_worker: StartWorker) -> None:
    wrapped = ["sh", "-c", 'ulimit -n 128; exec "$@"', "sh"]
    worker = start_worker(command=[*wrapped, *installed()])
    idle = [socket.create_connection(("127.0.0.1", worker.port)) for _ in range(200)]
    try:
        for _ in range(20):
            assert worker.get("/health").status_code == 200
        assert worker.execute("Once", max_tokens=3).end
        assert worker.stop() == 0, "it waits for none of them"
    finally:
        for connection in idle:
            connection.close()
