"""The ready callback of a real worker, as a real HTTP server receives it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import StartWorker
from tests.support import clock
from tests.support.pool_manager import (
    PoolManager,
    always,
    answer_ok,
    answers,
    answers_garbage,
    hangs_up,
    serving,
)
from tests.support.worker import run_to_exit, until
from worker.errors import CallbackFailed
from worker.observability.metrics import Metrics
from worker.pool import client
from worker.pool.client import PoolClient
from worker.settings import Settings

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


async def announced(url: str, *, has_served: bool = False, **settings: Any) -> Metrics:
    """Return the counts of the worker's own client for a callback."""

    async def payload() -> dict[str, Any]:
        return {"worker_id": "w"}

    metrics = Metrics("w")
    pool = PoolClient(Settings(callback_url=url, **settings), metrics)
    try:
        await pool.announce(payload, lambda: has_served)
    finally:
        await pool.close()
    return metrics


def wait_until_accepted(manager: PoolManager) -> None:
    """The manager counts a message after its answer."""
    until(lambda: any(m.accepted for m in manager.callbacks), lambda: "none is counted")


def test_callbacks_pause_while_the_engine_is_not_ready(start_worker: StartWorker) -> None:
    with serving() as manager:
        manager.reply = always(503)
        running = start_worker("--callback-url", f"{manager.url}/ready", can_be_held=True)
        manager.wait_for(n_callbacks=1)
        running.hold.touch()
        running.kill_engine()
        running.wait_status("/ready", 503)
        time.sleep(2)
        manager.reply = answers()
        time.sleep(1)
        running.hold.unlink()
        running.wait_log("callback.accepted")
        wait_until_accepted(manager)
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
        wait_until_accepted(manager)
        n_sent = len(manager.callbacks)
        time.sleep(0.5)
        assert len(manager.callbacks) == n_sent
        assert [m.accepted for m in manager.callbacks].count(True) == 1
        assert running.metric("worker_callback_failures_total") == n_sent - 1
        assert running.stop() == 0


@pytest.mark.anyio
@pytest.mark.parametrize("reply", [answers_garbage, hangs_up])
async def test_an_invalid_answer_counts_as_a_failure(reply: Any) -> None:
    replies = [reply, reply, answer_ok]
    with serving() as manager:
        manager.reply = lambda handler: replies.pop(0)(handler)
        metrics = await announced(f"{manager.url}/ready")
        until(lambda: len(manager.callbacks) == 3, lambda: f"{manager.callbacks}")
        assert [m.accepted for m in manager.callbacks] == [False, False, True]
        assert metrics.callback_failures._value.get() == 2


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


@pytest.mark.anyio
@pytest.mark.parametrize(("token", "fault"), [(None, "is not set"), ("old", "has another value")])
async def test_a_refused_token_is_named(token: str | None, fault: str) -> None:
    with serving() as manager:
        manager.reply = answers(401)
        with pytest.raises(CallbackFailed, match=f"LLORCH_CALLBACK_TOKEN {fault}"):
            await announced(f"{manager.url}/ready", callback_token=token)


@pytest.mark.anyio
async def test_a_callback_is_tried_until_its_timeout_is_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even if a pause between two attempts would be longer than the remaining time."""
    monkeypatch.setattr("random.uniform", lambda least, most: most)
    began = time.monotonic()
    with serving() as manager:
        manager.reply = lambda handler: answers(503 if time.monotonic() < began + 2.2 else 200)(
            handler
        )
        await announced(f"{manager.url}/ready", callback_timeout=3)
        wait_until_accepted(manager)


@pytest.mark.anyio
async def test_an_unreachable_manager_is_given_up_after_the_timeout() -> None:
    with serving() as manager:
        url = f"{manager.url}/ready"
    before = time.monotonic()
    with pytest.raises(CallbackFailed, match="within 1 s"):
        await announced(url, callback_timeout=1)
    await announced(url, callback_timeout=1, has_served=True)  # clients have found it without
    assert clock.in_time(before, 60), "2 s on a quiet machine; otherwise it has no end"


@pytest.mark.anyio
async def test_a_pause_of_the_worker_does_not_use_up_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pause does not count as time without an answer of the manager."""
    now: float = 0.0
    plain, paused = PoolClient.post, [100.0]
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + now))

    async def post(pool: PoolClient, *args: Any) -> tuple[int | None, str]:
        nonlocal now
        if paused:
            now += paused.pop()
            return None, "no answer"
        return await plain(pool, *args)

    monkeypatch.setattr(PoolClient, "post", post)
    with serving() as manager:
        await announced(f"{manager.url}/ready", callback_timeout=30)
        manager.wait_for(n_callbacks=1)


@pytest.mark.anyio
async def test_a_refused_optional_callback_raises_nothing() -> None:
    with serving() as manager:
        manager.reply = answers(404)
        metrics = await announced(f"{manager.url}/ready", callback_optional=True)
        manager.wait_for(n_callbacks=1)
        assert [m.accepted for m in manager.callbacks] == [False]
        assert metrics.callback_failures._value.get() == 1


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
