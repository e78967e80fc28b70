"""A real worker sleeps: its memory is released, and the next request wakes it."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

import psutil
import pytest

from tests.conftest import StartWorker
from tests.support.worker import WorkerProcess, until


@pytest.fixture
def running(share_worker: StartWorker) -> WorkerProcess:
    return share_worker("--sleep-idle-seconds", "3600")


@pytest.fixture
def embedding(share_worker: StartWorker) -> WorkerProcess:
    return share_worker("--pooling", "mean", "--sleep-idle-seconds", "3600")


def test_a_worker_that_sleeps_gives_its_memory_back_and_answers_the_same(
    running: WorkerProcess,
) -> None:
    before = running.execute("Once upon a time", max_tokens=12, temperature=0)
    assert running.post("/sleep", {}).json() == {"status": "sleeping"}
    until(lambda: not running.children(), lambda: str(running.children()), running)
    assert running.get("/is_sleeping").json() == {"is_sleeping": True}
    assert running.get("/ready").json() == {"ready": True, "state": "sleeping"}
    health = running.get("/health").json()
    assert (health["status"], health["state"], health["resident"]) == (
        "healthy",
        "sleeping",
        False,
    )
    assert running.get("/props").json()["is_sleeping"] is True
    assert running.get("/status").json()["memory"] == []
    assert psutil.Process(running.pid).memory_full_info().uss < 60 * 2**20
    after = running.execute("Once upon a time", max_tokens=12, temperature=0)
    assert after.text == before.text
    assert running.get("/health").json()["state"] == "ready"
    assert not running.get("/info").json()["engine_crashes"]


def test_ollamas_clients_see_what_a_sleeping_worker_has_loaded(running: WorkerProcess) -> None:
    body = {"model": "tiny-model", "stream": False, "options": {"num_predict": 3}}

    def generate(**fields: object) -> dict[str, Any]:
        answer: dict[str, Any] = running.post("/api/generate", body | fields).json()
        return answer

    assert generate(prompt="Hello")["load_duration"] == 0
    assert running.post("/sleep", {}).status_code == 200
    assert running.get("/api/ps").json() == {"models": []}
    assert generate(keep_alive=0)["done_reason"] == "unload"
    assert running.get("/is_sleeping").json() == {"is_sleeping": True}
    assert generate()["done_reason"] == "load"
    assert running.get("/is_sleeping").json() == {"is_sleeping": False}
    assert running.post("/wake_up", {}).json() == {"status": "awake"}
    [loaded] = running.get("/api/ps").json()["models"]
    left = datetime.fromisoformat(loaded["expires_at"]) - datetime.now(UTC)
    assert 3500 < left.total_seconds() < 3601
    assert running.post("/sleep", {}).status_code == 200
    answer = generate(prompt="Hello")
    assert 50e6 < answer["load_duration"] < answer["total_duration"]


def test_the_request_that_wakes_an_embedder_has_its_load_duration(embedding: WorkerProcess) -> None:
    assert embedding.post("/sleep", {}).status_code == 200
    body = {"model": "tiny-model", "input": "Hello " * 400, "truncate": True}
    answer = embedding.post("/api/embed", body).json()
    assert 50e6 < answer["load_duration"] < answer["total_duration"]


@pytest.mark.parametrize(
    ("path", "field"), [("/api/embed", "input"), ("/api/embeddings", "prompt")]
)
def test_an_empty_request_of_ollamas_wakes_an_embedder(
    embedding: WorkerProcess, path: str, field: str
) -> None:
    assert embedding.post("/sleep", {}).status_code == 200
    answer = embedding.post(path, {"model": "tiny-model", field: ""}).json()
    assert not answer.get("embeddings", answer.get("embedding"))
    assert embedding.get("/is_sleeping").json() == {"is_sleeping": False}


FIRST_PROCESS = """\
import ctypes
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
from worker.cli import cpu
cpu()
"""
"""The installed command, which adopts orphans like the first process of a container."""


@pytest.mark.skipif(sys.platform != "linux", reason="no subreaper on other systems")
def test_a_containers_first_process_leaves_no_zombie(start_worker: StartWorker) -> None:
    running = start_worker(command=[sys.executable, "-c", FIRST_PROCESS])
    running.replace_engine()
    assert not [each for each in running.children() if each.status() == psutil.STATUS_ZOMBIE]
    assert running.post("/sleep", {}).json() == {"status": "sleeping"}
    until(lambda: not running.children(), lambda: str(running.children()), running)
