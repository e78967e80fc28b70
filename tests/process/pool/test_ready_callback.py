"""The ready callback of a real worker, as a real HTTP server receives it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartWorker
from tests.support.pool_manager import (
    always,
    answer_ok,
    answers,
    answers_garbage,
    hangs_up,
    serving,
)
from tests.support.worker import run_to_exit, until
from worker.observability.metrics import Metrics
from worker.pool.client import PoolClient
from worker.settings import Settings

PAYLOAD = {
    "worker_id", "model_ref", "vram_bytes", "uri", "backend", "device", "capabilities",
    "protocol", "slots", "context_length", "incarnation", "version",
}  # fmt: skip


def test_exactly_one_after_ready_with_the_whole_payload(start_worker: StartWorker) -> None:
    with serving(token="pool-secret") as manager:
        running = start_worker(
            *("--callback-url", f"{manager.url}/ready", "--worker-id", "w-1", "--slots", "3"),
            *("--advertise-host", "localhost"),
            env={"LLORCH_CALLBACK_TOKEN": "pool-secret"},
        )
        manager.wait_for(n_callbacks=1)
        running.execute("Once", max_tokens=3, ignore_eos=True)
        assert running.stop() == 0
        (message,) = manager.callbacks
    assert message.authorized
    assert message.ready_status == 200, "/ready was asked while the callback was being received"
    payload = message.payload
    assert set(payload) == PAYLOAD
    assert payload["worker_id"] == "w-1"
    assert payload["model_ref"] == "tiny-model"
    assert payload["uri"] == f"http://localhost:{running.port}", "the advertised host is in it"
    assert payload["backend"] == "cpu" and payload["device"] == "CPU"
    assert payload["capabilities"] == ["text-gen"] and payload["protocol"] == "sse"
    assert payload["slots"] == 3 and payload["context_length"] == 1024
    assert payload["vram_bytes"] > 1_000_000
    assert manager.verdict() == []


def test_it_is_sent_again_until_it_is_taken(start_worker: StartWorker) -> None:
    with serving() as manager:
        manager.reply = answers(500, 429, 302)  # type: ignore[assignment]
        running = start_worker("--callback-url", f"{manager.url}/ready")
        manager.wait_for(n_callbacks=2)
        assert running.execute("Once", max_tokens=3, ignore_eos=True).end["tokens_out"] >= 1
        manager.reply = answers()  # type: ignore[assignment]
        running.wait_log("callback.accepted")
        # The manager counts a message after its answer.
        until(lambda: any(m.accepted for m in manager.callbacks), 60, lambda: "none is counted")
        n_sent = len(manager.callbacks)
        time.sleep(0.5)
        assert len(manager.callbacks) == n_sent
        assert [m.accepted for m in manager.callbacks].count(True) == 1
        assert running.metric("worker_callback_failures_total") == n_sent - 1
        assert running.stop() == 0


@pytest.mark.anyio
@pytest.mark.parametrize("reply", [answers_garbage, hangs_up])
async def test_what_is_no_answer_is_not_taken_for_one(reply: Any) -> None:
    """By the client that the worker has for it."""
    replies = [reply, reply, answer_ok]
    with serving() as manager:
        manager.reply = lambda handler: replies.pop(0)(handler)
        metrics = Metrics("w")
        pool = PoolClient(Settings(callback_url=f"{manager.url}/ready"), metrics)
        await pool.announce({"worker_id": "w"}, lambda: False)
        await pool.close()
        until(lambda: len(manager.callbacks) == 3, 60, lambda: f"{manager.callbacks}")
        assert [m.accepted for m in manager.callbacks] == [False, False, True]
        assert metrics.callback_failures._value.get() == 2


def test_a_refusal_is_final(warm_cache: Path) -> None:
    with serving() as manager:
        manager.reply = answers(403, 403)  # type: ignore[assignment]
        exit = run_to_exit(
            "--port", "0", "--callback-url", f"{manager.url}/ready", cache_dir=warm_cache
        )
        manager.wait_for(n_callbacks=1)
        assert len(manager.callbacks) == 1
    assert exit.code == 1
    assert exit.failure["code"] == "CALLBACK_FAILED"
    assert "403" in exit.sentence and manager.url in exit.sentence


@pytest.mark.anyio
async def test_a_manager_has_all_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a pause between two attempts may be longer than what is left of it."""
    monkeypatch.setattr("random.uniform", lambda least, most: most)
    began = time.monotonic()
    with serving() as manager:
        manager.reply = lambda handler: answers(503 if time.monotonic() < began + 2.2 else 200)(  # type: ignore[operator]
            handler
        )
        pool = PoolClient(
            Settings(callback_url=f"{manager.url}/ready", callback_timeout=3), Metrics("w")
        )
        await pool.announce({"worker_id": "w"}, lambda: False)
        await pool.close()
        assert manager.callbacks[-1].accepted


def test_nobody_there_ends_the_worker_in_time(warm_cache: Path) -> None:
    with serving() as manager:
        url = f"{manager.url}/ready"
    before = time.monotonic()
    exit = run_to_exit(
        "--port", "0", "--callback-url", url, "--callback-timeout", "2", cache_dir=warm_cache
    )
    assert time.monotonic() - before < 60, "3 s on a quiet machine; otherwise it has no end"
    assert exit.code == 1 and exit.failure["code"] == "CALLBACK_FAILED"
    assert "2 s" in exit.sentence


@pytest.mark.parametrize("answers_with", [None, 403])
def test_a_worker_that_has_served_is_ended_by_no_manager(
    start_worker: StartWorker, answers_with: int | None
) -> None:
    """Neither by one that is away for too long, nor by one that refuses."""
    with serving() as manager:
        url = f"{manager.url}/ready"
        manager.reply = always(503)  # type: ignore[assignment]
        running = start_worker("--callback-url", url, "--callback-timeout", "4")
        assert running.execute("Once", max_tokens=3, ignore_eos=True).end["tokens_out"] == 3
        if answers_with is not None:
            manager.reply = answers(answers_with)  # type: ignore[assignment]
    # The manager has gone now, unless it has refused before.
    running.wait_log("callback.given_up")
    assert running.is_ready()
    assert running.execute("Once", max_tokens=3, ignore_eos=True).end["tokens_out"] == 3
    assert running.stop() == 0


def test_an_optional_callback_never_ends_the_worker(start_worker: StartWorker) -> None:
    with serving() as manager:
        manager.reply = answers(404)  # type: ignore[assignment]
        running = start_worker("--callback-url", f"{manager.url}/ready", "--callback-optional")
        running.wait_log("callback.given_up")
        assert running.is_ready()
        assert running.execute("Once", max_tokens=3, ignore_eos=True).end["tokens_out"] >= 1
        assert running.stop() == 0
