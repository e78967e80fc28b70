"""The whole worker with a model from the hub: its progress, and the exit code of each failure."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.conftest import StartWorker
from tests.support import clock
from tests.support.commands import DEAF, diagnose
from tests.support.hub_server import COMMIT, TOKEN, Hub, Repo
from tests.support.random_models import random_model
from tests.support.random_projectors import random_projector
from tests.support.worker import run_to_exit, shown, until
from worker.models.resolve import resolve
from worker.settings import Settings


@pytest.fixture
def tiny_gguf(warm_cache: Path) -> bytes:
    return asyncio.run(resolve(Settings(cache_dir=warm_cache), None)).gguf_path.read_bytes()


def test_a_model_from_the_hub_is_served_and_survives_an_outage(
    hub: Hub, tiny_gguf: bytes, start_worker: StartWorker, tmp_path: Path
) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": tiny_gguf}, private=True)
    hub.chunk_delay_seconds = 1.0
    env, cache = {"HF_TOKEN": TOKEN}, tmp_path / "cache"
    ref = f"hf:o/r@{COMMIT}::file=m.gguf"
    worker = start_worker("--model", ref, env=env, cache_dir=cache, wait_ready=False)
    until(
        lambda: worker.get("/ready").json().get("phase") == "download",
        lambda: worker.stderr,
        worker,
    )
    assert worker.get("/health").status_code == 200
    hub.chunk_delay_seconds = 0.0
    worker.wait_ready()
    assert worker.execute("Once upon a time", max_tokens=4).end["tokens_out"] == 4
    assert worker.get("/health").json()["model"] == ref
    assert worker.stop() == 0
    assert TOKEN not in worker.stderr
    hub.requests.clear()
    hub.fail_with = (500, {})
    again = start_worker("--model", ref, env=env, cache_dir=cache)
    assert again.is_ready() and hub.requests == []


def test_a_failed_download_ends_the_worker_with_code_6(hub: Hub, tmp_path: Path) -> None:
    hub.repos["o/gated"] = Repo({"m.gguf": b"GGUF"}, gated=True)
    ref = "hf:o/gated::file=m.gguf"
    ended = run_to_exit("--port", "0", "--model", ref, cache_dir=tmp_path)
    assert ended.code == 6
    assert "HF_TOKEN" in ended.sentence
    assert "Traceback" not in ended.stderr


def test_a_stop_signal_does_not_wait_for_the_download(
    hub: Hub, start_worker: StartWorker, tmp_path: Path
) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": bytes(30 * 2**20)})
    hub.chunk_delay_seconds = 2.0  # a minute in all
    ref = "hf:o/r::file=m.gguf"
    worker = start_worker("--model", ref, cache_dir=tmp_path, wait_ready=False)
    until(
        lambda: any(path.startswith("/blobs/") for path, _ in hub.bodies()),
        lambda: worker.stderr,
        worker,
    )
    started = time.monotonic()
    assert worker.stop() == 0
    assert clock.in_time(started, 20)


def test_one_of_several_quantisations_is_chosen_and_logged(
    hub: Hub, tiny_gguf: bytes, start_worker: StartWorker, tmp_path: Path
) -> None:
    hub.repos["o/r"] = Repo({"m-Q4_K_M.gguf": b"no model", "m-Q8_0.gguf": tiny_gguf})
    worker = start_worker("--model", "hf:o/r", cache_dir=tmp_path / "cache")
    (chosen,) = worker.logs("model.quantisation_chosen")
    assert chosen["file"] == "m-Q8_0.gguf" and chosen["others"] == ["Q4_K_M"]
    assert chosen["size_bytes"] == len(tiny_gguf) < chosen["memory_bytes"] / 2
    assert worker.stop() == 0
    guessing = ("--draft", "hf:o/r", "--speculate", "draft")
    assert shown("plan", tmp_path / "cache", *guessing)["parts"]["draft"] > 0
    for name, more in (("model", {}), ("draft", {"speculate": "draft"})):
        report = diagnose(tmp_path / "cache", DEAF, **{name: "hf:o/r"}, **more)
        (check,) = (check for check in report.checks if check.name == name)
        assert check.status == "ok" and check.text.endswith("m-Q8_0.gguf")


def test_a_repositorys_projector_comes_with_its_model(
    hub: Hub, start_worker: StartWorker, tmp_path: Path
) -> None:
    files = {"dense.gguf": random_model("dense"), "mmproj-F32.gguf": random_projector("gemma3")}
    hub.repos["o/sees"] = Repo({name: path.read_bytes() for name, path in files.items()})
    ref = f"hf:o/sees@{COMMIT}::file=dense.gguf"
    text_only = Settings(model=ref, mmproj="none", cache_dir=tmp_path)
    assert asyncio.run(resolve(text_only, ref)).projector is None
    assert not any("mmproj" in path for path, _ in hub.bodies())
    flags = ("--model", ref, "--context-length", "512")
    worker = start_worker(*flags, cache_dir=tmp_path)
    assert worker.get("/info").json()["engine"]["projector"]["name"] == "mmproj-F32.gguf"
    assert worker.stop() == 0
    plan = shown("plan", tmp_path, *flags)
    assert plan["parts"]["projector"] > files["mmproj-F32.gguf"].stat().st_size
