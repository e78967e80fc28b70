"""A sleeping worker has no engine, and the next request starts one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from tests.support.supervised import (
    all_of,
    engine_pid,
    failure_of,
    request,
    submit,
    supervised,
    until,
)
from worker.errors import NotReady
from worker.supervisor.status import NO_STATS
from worker.wire.messages import Finished, Stats

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("script")]


async def test_concurrent_requests_wake_a_sleeping_worker_once() -> None:
    async with supervised() as supervisor:
        first = engine_pid(supervisor)
        supervisor.on_events([Stats(kv_cells_used=3, kv_cells_total=8, steps=1)])
        supervisor.sleep()
        supervisor.sleep()
        status = supervisor.status()
        assert (status.state, status.pool_status, status.is_ready) == (
            "sleeping",
            "sleeping",
            True,
        )
        assert status.vram_bytes == 0 and not status.resident and not status.is_stalled
        assert status.stats == NO_STATS, "its cells go with it"
        jobs = await asyncio.gather(*(submit(supervisor, request("say", f"{i}")) for i in "abc"))
        for job in jobs:
            assert isinstance((await all_of(job))[-1], Finished)
            assert job.engine_restarts == 0
        assert supervisor.state == "ready" and engine_pid(supervisor) != first
        assert not supervisor.status().crashes


async def test_sleeping_and_waking_leaks_no_file_descriptor() -> None:
    def n_open() -> int:
        return len(os.listdir("/dev/fd"))

    async with supervised() as supervisor:
        before = n_open()
        for _ in range(3):
            supervisor.sleep()
            await all_of(await submit(supervisor, request("say", "a")))
        assert n_open() <= before


async def test_the_workers_own_residency_checks_do_not_keep_it_awake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.supervisor.supervisor.RESIDENCY_SECONDS", 0.05)
    async with supervised(sleep_idle_seconds=0.5) as supervisor:
        await until(lambda: supervisor.state == "sleeping")
        assert not supervisor.has_served, "by a client"
        supervisor.begin_draining()
        assert supervisor.status().vram_bytes == 0


async def test_a_busy_worker_does_not_sleep_and_says_why() -> None:
    async with supervised() as supervisor:
        job = await submit(supervisor, request("hold"))
        await until(lambda: job.has_slot)

        async def sleep() -> None:
            supervisor.sleep()

        error = await failure_of(sleep())
        assert isinstance(error, NotReady) and "it has a request" in error.message
        job.cancel()


async def test_a_worker_that_is_waking_does_not_sleep_and_says_why() -> None:
    async with supervised() as supervisor:

        async def sleep() -> None:
            supervisor.sleep()

        for wake, why in (
            (supervisor.wake, "it is waking"),
            (lambda: supervisor.open(request("say"), None), "it has a request"),
        ):
            await until(lambda: supervisor.state == "ready" and not supervisor.status().queued)
            supervisor.sleep()
            wake()
            error = await failure_of(sleep())
            assert isinstance(error, NotReady) and why in error.message


async def test_a_draining_worker_does_not_wake_and_says_why() -> None:
    async with supervised() as supervisor:
        supervisor.sleep()
        supervisor.begin_draining()
        with pytest.raises(NotReady, match="it is draining"):
            supervisor.wake()


async def test_an_idle_worker_falls_asleep_by_itself_repeatedly() -> None:
    async with supervised(sleep_idle_seconds=0.2) as supervisor:
        for _ in range(2):
            await until(lambda: supervisor.state == "sleeping")
            job = await submit(supervisor, request("say"))
            assert isinstance((await all_of(job))[-1], Finished)


async def test_the_time_of_a_load_does_not_count_as_idle() -> None:
    async with supervised(sleep_idle_seconds=5) as supervisor:
        supervisor.sleep()
        supervisor.wake()
        supervisor._used_at -= 60  # as if the load took this long
        await until(lambda: supervisor.state == "ready")
        await asyncio.sleep(1.1)  # it checks once a second
        assert supervisor.state == "ready"


async def test_a_job_knows_how_long_it_waited_for_the_engine_to_wake() -> None:
    async with supervised() as supervisor:
        supervisor.sleep()
        job = supervisor.open(request("say"))
        await all_of(job)
        assert 0 < job.held_seconds < job.age_seconds
        later = await submit(supervisor, request("say"))
        await all_of(later)
        assert later.held_seconds == 0


async def test_watchers_of_the_progress_see_a_wake_and_end_with_a_drain(
    script: Callable[..., None],
) -> None:
    script("ok", "hang")
    async with supervised() as supervisor:
        supervisor.sleep()
        assert [each.phase async for each in supervisor.watch_progress()] == ["sleeping"]
        supervisor.wake()
        phases = []
        async for progress in supervisor.watch_progress():
            phases.append(progress.phase)
            if progress.phase == "load":
                supervisor.begin_draining()
        assert set(phases) == {"sleeping", "load"}


async def test_an_engine_that_dies_while_waking_is_reported_and_tried_again(
    script: Callable[..., None],
) -> None:
    script("ok", "die", "ok")

    async with supervised() as supervisor:
        supervisor.sleep()
        job = supervisor.open(request("say"))
        while supervisor.status().progress.phase != "recovering":
            await supervisor.changed.wait()
        assert supervisor.state == "recovering", "whoever waits for a change looks only then"
        assert isinstance((await all_of(job))[-1], Finished)
        assert len(supervisor.status().crashes) == 1


async def test_a_job_that_is_cancelled_before_the_engine_wakes_ends() -> None:
    async with supervised() as supervisor:
        supervisor.sleep()
        submitted = asyncio.create_task(submit(supervisor, request("say", "gone")))
        await asyncio.sleep(0)
        assert supervisor.cancel("gone")
        await failure_of(submitted)
        await until(lambda: supervisor.state == "ready")
