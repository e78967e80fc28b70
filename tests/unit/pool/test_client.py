"""The worker's client of a pool manager: what it sends again, and which answers are final."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import clock
from tests.support.pool_manager import (
    answer_ok,
    answers,
    answers_garbage,
    hangs_up,
    serving,
)
from tests.support.worker import until
from worker.errors import CallbackFailed
from worker.observability.metrics import Metrics
from worker.pool import client
from worker.pool.client import PoolClient
from worker.pool.heartbeat import Heartbeats
from worker.settings import Settings

pytestmark = pytest.mark.anyio


async def test_the_last_heartbeat_is_repeated_until_it_is_accepted() -> None:
    answers, sent = ["", "it answered late", ""], list[str]()
    statuses = ["ready", "draining"]

    class Client(PoolClient):
        async def post(
            self, url: str, payload: Mapping[str, Any], timeout_seconds: float
        ) -> tuple[int | None, str]:
            sent.append(f"{payload['sequence']} {payload['status']}")
            return 200, answers.pop(0)

    def compose() -> dict[str, Any]:
        status = statuses[min(len(sent), 1)]
        return {"status": status, "state": status}

    client, changed = Client(Settings(), Metrics("w")), asyncio.Event()
    beats = Heartbeats(client, Metrics("w"), "http://m", 60.0, compose, lambda: changed)
    await beats.end(now=False)
    assert sent == ["1 ready", "2 draining", "3 draining"] and beats._task.done()


async def test_no_cookie_of_a_manager_is_sent_back() -> None:
    cookies: list[str | None] = []

    def reply(handler: BaseHTTPRequestHandler) -> int:
        cookies.append(handler.headers.get("Cookie"))
        handler.send_response(302)
        handler.send_header("Set-Cookie", f"nonce-{len(cookies)}={'x' * 500}")
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return 302

    client = PoolClient(Settings(), Metrics("w"))
    with serving() as manager:
        manager.reply = reply
        for _ in range(3):
            await client.post(f"{manager.url}/heartbeat", {"worker_id": "w"}, 60.0)
    await client.close()
    assert cookies == [None] * 3


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


@pytest.mark.parametrize("reply", [answers_garbage, hangs_up])
async def test_an_invalid_answer_counts_as_a_failure(reply: Any) -> None:
    replies = [reply, reply, answer_ok]
    with serving() as manager:
        manager.reply = lambda handler: replies.pop(0)(handler)
        metrics = await announced(f"{manager.url}/ready")
        until(lambda: len(manager.callbacks) == 3, lambda: f"{manager.callbacks}")
        assert [m.accepted for m in manager.callbacks] == [False, False, True]
        assert metrics.callback_failures._value.get() == 2


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
        manager.wait_accepted()


@pytest.mark.parametrize(("token", "fault"), [(None, "is not set"), ("old", "has another value")])
async def test_a_refused_token_is_named(token: str | None, fault: str) -> None:
    with serving() as manager:
        manager.reply = answers(401)
        with pytest.raises(CallbackFailed, match=f"LLORCH_CALLBACK_TOKEN {fault}"):
            await announced(f"{manager.url}/ready", callback_token=token)


async def test_an_unreachable_manager_is_given_up_after_the_timeout() -> None:
    with serving() as manager:
        url = f"{manager.url}/ready"
    before = time.monotonic()
    with pytest.raises(CallbackFailed, match="within 1 s"):
        await announced(url, callback_timeout=1)
    await announced(url, callback_timeout=1, has_served=True)  # clients have found it without
    assert clock.in_time(before, 60), "2 s on a quiet machine; otherwise it has no end"


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


async def test_a_refused_optional_callback_raises_nothing() -> None:
    with serving() as manager:
        manager.reply = answers(404)
        metrics = await announced(f"{manager.url}/ready", callback_optional=True)
        manager.wait_for(n_callbacks=1)
        assert [m.accepted for m in manager.callbacks] == [False]
        assert metrics.callback_failures._value.get() == 1
