"""Prompts reach the worker that has their prefix, by the workers' own counts. Real Ray."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.system.fleet.load import job, stream
from tests.system.fleet.running import Running

pytestmark = [pytest.mark.long, pytest.mark.anyio, pytest.mark.timeout(900)]
SLOTS = 4
TURNS = 6


async def counted_by_workers(client: httpx.AsyncClient, family: str) -> float:
    """Return the sum of a counter of all workers, from the gateway's `/metrics`."""
    text = (await client.get("/metrics")).text
    return sum(
        sample.value
        for found in text_string_to_metric_families(text)
        if found.name == family
        for sample in found.samples
    )


async def converse(client: httpx.AsyncClient, number: int, turns: list[dict[str, Any]]) -> None:
    """Run one conversation, turn by turn."""
    opening = f"Tell story {number} of a brave fox, a small bird and the moon over the dark hill."
    messages = [{"role": "user", "content": opening}]
    for turn in range(TURNS):
        body = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        completion = answer.json()
        usage = completion["usage"]
        turns.append({
            "conversation": number, "turn": turn, "worker": answer.headers["x-llorch-worker"],
            "prompt": usage["prompt_tokens"],
            "cached": usage["prompt_tokens_details"]["cached_tokens"],
        })  # fmt: skip
        messages.append(completion["choices"][0]["message"])
        messages.append({"role": "user", "content": f"And what did they do in hour {turn}?"})


@pytest.mark.parametrize("at_once", [3 * SLOTS, 4], ids=["all at once", "four at a time"])
async def test_conversations_stay_at_the_worker_that_has_their_prefix(
    running: Running, at_once: int
) -> None:
    """As many conversations as slots, so that each slot fits exactly one.

    With one KV pool, because in a split one a worker weighs a prefix against the cost of gaps
    between slots, and the bundled model computes a few words faster than that.
    """
    await running.restored(3, slots=SLOTS, more="kv_unified = true")
    turns: list[dict[str, Any]] = []
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with gate:
            await converse(client, 100 * at_once + number, turns)

    async with httpx.AsyncClient(base_url=running.uri, timeout=120, trust_env=False) as client:
        before = await counted_by_workers(client, "vllm:prefix_cache_hits")
        await asyncio.gather(*(one(number) for number in range(3 * SLOTS)))
        hits = await counted_by_workers(client, "vllm:prefix_cache_hits") - before
    assert hits == sum(each["cached"] for each in turns)
    prompts = {(each["conversation"], each["turn"]): each["prompt"] for each in turns}
    later = [each for each in turns if each["turn"]]
    found = [
        each
        for each in later
        if each["cached"] >= 0.95 * prompts[each["conversation"], each["turn"] - 1]
    ]
    stayed = len({(each["conversation"], each["worker"]) for each in turns})
    load = Counter(each["worker"] for each in turns)
    print(f"affinity, {at_once} of {3 * SLOTS} conversations at once on {3 * SLOTS} slots: "
          f"{len(found)} of {len(later)} turns found their beginning, {hits:.0f} tokens; "
          f"{stayed - 3 * SLOTS} moved; requests per worker {sorted(load.values())}")  # fmt: skip
    assert len(found) >= 0.95 * len(later)
    assert stayed == 3 * SLOTS
    assert max(load.values()) <= 2 * sum(load.values()) / 3


async def test_a_prefix_that_most_prompts_share_does_not_overload_one_worker(
    running: Running,
) -> None:
    await running.restored(3, slots=SLOTS)
    shared = "Once upon a time, in a land of hills and rivers, there was a brave fox. " * 5
    questions = [
        job(shared + f"{n}" if n % 5 else f"Alone, number {n}, a bird sang", 40) for n in range(120)
    ]
    outcomes = []
    busiest: list[float] = []

    async def client(own: list[dict[str, Any]]) -> None:
        for body in own:
            outcomes.append(await stream(running.uri, body))

    async def watch() -> None:
        while True:
            loads = [each["running"] for each in await running.workers()]
            if sum(loads) >= 9:
                busiest.append(max(loads) / (sum(loads) / len(loads)))
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client(questions[n::12]) for n in range(12)))
    watching.cancel()
    load = Counter(outcome.worker for outcome in outcomes)
    ratio = max(load.values()) / (sum(load.values()) / 3)
    hits = sum(outcome.cached_tokens > 0 for outcome in outcomes)
    print(f"affinity, four of five prompts begin alike: requests per worker "
          f"{sorted(load.values())}, max/mean {ratio:.2f}, at any moment {max(busiest):.2f} "
          f"at most; {hits} of 96 found the beginning")  # fmt: skip
    assert {outcome.kind for outcome in outcomes} == {"ok"}
    assert ratio <= 2
