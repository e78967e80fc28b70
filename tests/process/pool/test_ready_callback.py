"""The ready callback of a real worker, as a real HTTP server receives it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.conftest import StartWorker
from tests.support.pool_manager import (
    always,
    answers,
    serving,
)
from tests.support.worker import run_to_exit

PAYLOAD = {
    "worker_id", "model_ref", "vram_bytes", "uri", "backend", "device", "capabilities",
    "protocol", "slots", "context_length", "incarnation", "version",
}  # fmt: skip


def test_one_callback_comes_after_ready_with_the_whole_payload(start_worker: StartWorker) -> None:
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


TRIES_OFTEN = """\
from worker.pool import client
client.LONGEST_DELAY_SECONDS = 0.1
from worker.cli import cpu
cpu()
"""
"""The installed command, whose pauses between two callbacks do not grow."""


def test_callbacks_pause_while_the_engine_is_not_ready(start_worker: StartWorker) -> None:
    command = [sys.executable, "-c", TRIES_OFTEN]
    with serving() as manager:
        manager.reply = always(503)
        flags = ("--callback-url", f"{manager.url}/ready")
        running = start_worker(*flags, command=command, can_be_held=True)
        manager.wait_for(n_callbacks=5)
        running.hold.touch()
        running.kill_engine()
        running.wait_status("/ready", 503)
        time.sleep(1)
        manager.reply = answers()
        running.hold.unlink()
        running.wait_log("callback.accepted")
        manager.wait_accepted()
        statuses = [message.ready_status for message in manager.callbacks]
    assert statuses[-1] == 200 and statuses.count(503) <= 1, "one was under way"


def test_a_callback_is_repeated_until_it_is_answered_with_2xx(start_worker: StartWorker) -> None:
    with serving() as manager:
        manager.reply = answers(500, 429, 302)
        running = start_worker("--callback-url", f"{manager.url}/ready")
        manager.wait_for(n_callbacks=2)
        assert running.execute("Once", max_tokens=3, ignore_eos=True).end["tokens_out"] >= 1
        manager.reply = answers()
        running.wait_log("callback.accepted")
        manager.wait_accepted()
        n_sent = len(manager.callbacks)
        time.sleep(0.5)
        assert len(manager.callbacks) == n_sent
        assert [m.accepted for m in manager.callbacks].count(True) == 1
        assert running.metric("worker_callback_failures_total") == n_sent - 1
        assert running.stop() == 0


def test_a_refused_callback_is_final(warm_cache: Path) -> None:
    with serving() as manager:
        manager.reply = answers(403, 403)
        exit = run_to_exit(
            "--port", "0", "--callback-url", f"{manager.url}/ready", cache_dir=warm_cache
        )
        manager.wait_for(n_callbacks=1)
        assert len(manager.callbacks) == 1
    assert exit.code == 1
    assert exit.failure["code"] == "CALLBACK_FAILED"
    assert "403" in exit.sentence and manager.url in exit.sentence


def test_a_refusal_does_not_end_a_worker_that_has_served(start_worker: StartWorker) -> None:
    with serving() as manager:
        manager.reply = always(503)
        running = start_worker("--callback-url", f"{manager.url}/ready")
        assert running.execute("Once", max_tokens=3, ignore_eos=True).end["tokens_out"] == 3
        manager.reply = answers(403)
        running.wait_log("callback.given_up")
        assert running.is_ready()
        assert running.execute("Once", max_tokens=3, ignore_eos=True).end["tokens_out"] == 3
        assert running.stop() == 0
