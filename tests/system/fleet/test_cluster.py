"""A real fleet: Ray's nodes, Serve and the bundled model, damaged and measured.

`make fleet-test` runs this. Each test prints its figures; the assertions hold on a busy machine.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import time
from collections import Counter
from typing import Any

import psutil
import pytest

from tests.system.fleet.load import counted, crowd, job, stream
from tests.system.fleet.running import PATIENCE_SECONDS, ROUNDS, Running, file, has, has_gone
from worker.fleet.upstream import fetch

pytestmark = [pytest.mark.long, pytest.mark.anyio, pytest.mark.timeout(300 + 90 * ROUNDS)]
CLIENTS = 8


# --- faults ------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["child", "actor", "node"])
async def test_a_death_costs_at_most_the_victims_streams(running: Running, victim: str) -> None:
    await running.restored()
    seconds, n_streams = [], 0
    async with crowd(running.uri, CLIENTS, max_tokens=400) as outcomes:
        for _ in range(ROUNDS):
            busy: list[dict[str, Any]] = []
            while not busy:
                await asyncio.sleep(0.3)
                busy = [each for each in await running.workers() if each["running"]]
            worker = max(busy, key=lambda each: each["running"])
            n_streams += worker["running"] + 1  # one may have come in the meantime
            child, actor = running.children()[worker["id"]], running.actor(worker["id"])
            raylet = actor.parent()
            assert raylet is not None and "raylet" in raylet.name()
            {"child": child, "actor": actor, "node": raylet}[victim].kill()
            if victim == "node":
                running.add_node()
            await running.until(lambda workers, id=worker["id"]: all(  # type: ignore[misc]
                each["id"] != id for each in workers))  # fmt: skip
            seconds.append(await running.until(has(3)))
            assert await asyncio.to_thread(has_gone, child)
            print(f"{victim} killed: {counted(outcomes)}, whole after {seconds[-1]:.1f} s")
    counts = counted(outcomes)
    print(f"{victim} killed {ROUNDS} times: {counts}, whole again after "
          f"{', '.join(f'{each:.1f}' for each in seconds)} s")  # fmt: skip
    assert counts["cut"] == counts["lost"] == 0
    assert counts["error"] <= n_streams
    assert counts["ok"] > 0


async def test_a_stopped_worker_is_found(running: Running) -> None:
    await running.restored()
    async with crowd(running.uri, CLIENTS, max_tokens=400) as outcomes:
        await asyncio.sleep(1)
        worker = max(await running.workers(), key=lambda each: each["running"])
        running.children()[worker["id"]].send_signal(signal.SIGSTOP)
        found = await running.until(
            lambda workers: all(each["id"] != worker["id"] for each in workers)
        )
        whole = await running.until(has(3))
    counts = counted(outcomes)
    print(f"stopped worker: found after {found:.1f} s, whole {whole:.1f} s later, {counts}")
    assert counts["cut"] == counts["lost"] == 0


# --- changes -----------------------------------------------------------------------------


async def test_a_roll_fails_nobody_and_a_bad_model_takes_nothing_away(running: Running) -> None:
    await running.restored()
    before = {each["id"] for each in await running.workers()}
    async with crowd(running.uri, CLIENTS, max_tokens=100) as outcomes:
        began = time.monotonic()
        done = await asyncio.to_thread(running.command, "roll", "tiny")
        assert done.returncode == 0, done.stderr
        assert len(await running.workers()) == 3, "a client finds them as soon as it is done"
        await running.until(has(3))
        seconds = time.monotonic() - began
    print(f"roll without a spare device: {counted(outcomes)} in {seconds:.1f} s")
    assert before.isdisjoint(each["id"] for each in await running.workers())
    assert set(outcome.kind for outcome in outcomes) == {"ok"}

    bad = file().replace('name = "tiny"', 'name = "tiny"\nmodel = "/nowhere.gguf"')
    async with crowd(running.uri, CLIENTS, max_tokens=100) as outcomes:
        done = await asyncio.to_thread(running.up, bad)
    print(f"model that does not load: {counted(outcomes)}; {done.stderr.strip()}")
    assert done.returncode == 3
    assert "nowhere.gguf" in done.stderr and "Traceback" not in done.stderr
    assert set(outcome.kind for outcome in outcomes) == {"ok"}


async def test_a_gateway_that_takes_anothers_place_knows_its_workers(running: Running) -> None:
    await running.restored()
    address = "127.0.0.1", running.port
    changing = asyncio.create_task(
        asyncio.to_thread(running.up, f"max_body_bytes = 4096\n{file()}")
    )
    statuses = Counter[int]()
    while not changing.done():
        if (answer := await fetch(address, "GET", "/v1/models")) is not None:
            statuses[answer.status] += 1
        await asyncio.sleep(0.005)
    assert (await changing).returncode == 0 and statuses.keys() == {200}, statuses


# --- ways --------------------------------------------------------------------------------


async def test_a_full_fleet_refuses_exactly_what_is_too_much(running: Running) -> None:
    await running.restored(replicas=1, slots=4, queue=4)
    requests = [stream(running.uri, job(f"Once {n}", 800)) for n in range(24)]
    outcomes = await asyncio.gather(*requests)
    refused = [outcome for outcome in outcomes if outcome.status == 503]
    waited = max(outcome.first_ms for outcome in refused)
    print(f"overload: {counted(outcomes)}, {len(refused)} × 503 within {waited:.0f} ms")
    assert len([outcome for outcome in outcomes if outcome.kind == "ok"]) == 8
    assert len(refused) == 16
    assert all(int(outcome.headers[b"retry-after"]) >= 1 for outcome in refused)


async def test_the_gateway_adds_little_latency_and_cpu_time(running: Running) -> None:
    await running.restored()
    worker = (await running.workers())[0]
    direct, token = worker["uri"], running.token_of(worker["id"])
    await stream(direct, job("Once", 5), token=token)
    firsts: dict[str, list[float]] = {"direct": [], "fleet": []}
    gaps: dict[str, list[float]] = {"direct": [], "fleet": []}
    for n in range(30):
        for name, uri in (("direct", direct), ("fleet", running.uri)):
            outcome = await stream(uri, job(f"Once {n}", 60), token=token)
            firsts[name].append(outcome.first_ms)
            gaps[name] += outcome.gaps_ms
    gateway = the_gateway()
    cpu_before = sum(gateway.cpu_times()[:2])
    async with crowd(running.uri, 12, max_tokens=400) as outcomes:
        await asyncio.sleep(10)
    cpu = sum(gateway.cpu_times()[:2]) - cpu_before
    n_chunks = sum(len(outcome.gaps_ms) + 1 for outcome in outcomes)
    added = {
        what: statistics.median(values["fleet"]) - statistics.median(values["direct"])
        for what, values in (("first token", firsts), ("chunk", gaps))
    }
    cpu_us = 1e6 * cpu / n_chunks
    print(f"overhead: +{added['first token']:.1f} ms to the first token")
    print(f"overhead: {added['chunk']:+.2f} ms and {cpu_us:.0f} µs of CPU a chunk")
    # Three times the limit for an idle machine.
    assert added["first token"] < 18 and added["chunk"] < 1.5 and cpu_us < 450


def the_gateway() -> psutil.Process:
    """Find the gateway. (A process of Ray that has renamed itself has no environment.)"""
    (found,) = [
        each
        for each in psutil.process_iter(["cmdline"])
        if "ServeReplica:gateway" in " ".join(each.info["cmdline"] or [])
    ]
    return found


async def test_cancel_duplicate_and_disconnect_reach_the_worker(running: Running) -> None:
    await running.restored()
    port = running.port
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    milliseconds = []
    for n in range(5):
        body = job(f"A long tale {n}", 900)
        streaming = asyncio.create_task(stream(running.uri, body))
        await running.until(lambda workers: any(each["running"] for each in workers))
        duplicate = await stream(running.uri, {**body, "prompt": "Another"})
        assert duplicate.status == 409 or streaming.done()
        began = time.monotonic()
        cancelled = json.dumps({"job_id": body["job_id"]}).encode()
        answer = await fetch(("127.0.0.1", port), "POST", "/cancel", headers, cancelled)
        assert answer is not None and answer.status == 202
        assert (await streaming).kind in ("error", "ok")
        milliseconds.append(1000 * (time.monotonic() - began))
    left = []
    for n in range(5):
        began = time.monotonic()
        await stream(running.uri, job(f"Another long tale {n}", 900), leave_after=2)
        left.append(1000 * await idle(running))
    print(f"cancel to the stream's end {max(milliseconds):.0f} ms, disconnect to free cells "
          f"{max(left):.0f} ms at most")  # fmt: skip


async def idle(running: Running) -> float:
    """Return the seconds until no worker has a request."""
    began = time.monotonic()
    addresses = [each["uri"].removeprefix("http://").split(":") for each in await running.workers()]
    while True:
        answers = [await fetch((host, int(port)), "GET", "/health") for host, port in addresses]
        if all(answer is not None and b'"running":0' in answer.content for answer in answers):
            return time.monotonic() - began
        assert time.monotonic() - began < PATIENCE_SECONDS
        await asyncio.sleep(0.005)
