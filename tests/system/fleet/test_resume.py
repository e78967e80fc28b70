"""Answers that are resumed, controlled and looked up through two gateways, neither of which knows
what the other has forwarded. Real workers, without Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import DATA
from tests.support.bundled import bundled_with_template
from tests.support.gateway import gateway_before, token_of
from tests.support.worker import WorkerProcess
from tests.unit.fleet.scripted import call
from worker.fleet.gateway import Gateway

pytestmark = pytest.mark.anyio
GROUPS = ("one", "two")
RESUME = {"x-llorch-resume": "1"}
JOB: dict[str, Any] = {"prompt": "Once", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def workers(
    warm_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, WorkerProcess]]:
    """One worker of each of two groups; the second one reasons."""
    folder = tmp_path_factory.mktemp("workers")
    template = (DATA / "templates" / "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja").read_text(
        "utf-8"
    )
    thinker = bundled_with_template(folder / "thinker.gguf", template)
    running: dict[str, WorkerProcess] = {}
    for group in GROUPS:
        env = {"LLORCH_WORKER_TOKEN": token_of(f"{group}-0")}
        flags = ["--slots", "4", "--threads", "1", "--served-model-name", group]
        if group == "two":
            flags += ["--model", str(thinker), "--context-length", "2048"]
        running[group] = WorkerProcess.start(
            *flags, folder=folder / group, cache_dir=warm_cache, env=env
        )
    yield running
    for worker in running.values():
        worker.kill()


@pytest.fixture
def gateways(workers: dict[str, WorkerProcess]) -> tuple[Gateway, Gateway]:
    groups = {group: [worker] for group, worker in workers.items()}
    return gateway_before(groups), gateway_before(groups)


def events(stream: bytes) -> list[Any]:
    lines = [line for line in stream.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def tokens(stream: bytes) -> list[int]:
    """Return the tokens of a job's stream."""
    return [id for each in events(stream) if each["type"] == "token" for id in each["ids"]]


async def test_a_job_is_resumed_wherever_it_runs(gateways: tuple[Gateway, Gateway]) -> None:
    first, second = gateways
    for group in GROUPS:
        pinned = {**RESUME, "x-llorch-worker": f"{group}-0"}
        job = {**JOB, "job_id": f"job-{group}"}
        cut = await call(first, "/execute", job, headers=pinned, leave_after_chunks=3)
        assert cut.headers["x-llorch-resume"]
        head = b"".join(cut.chunks[:3])  # a busy machine may have forwarded more
        last = head.decode().rpartition("id: ")[2].partition("\n")[0]
        got = await call(second, f"/execute/job-{group}", headers={"last-event-id": last})
        assert got.status == 200 and got.headers["x-llorch-worker"] == f"{group}-0"
        assert len(tokens(head)) + len(tokens(got.body)) == JOB["max_tokens"]
        bad = await call(second, f"/execute/job-{group}", headers={"last-event-id": "9999"})
        assert bad.status == 400 and "9999" in bad.json["message"]
    assert (await call(second, "/execute/nobody")).status == 404


async def test_a_conversation_is_found_read_and_ended(gateways: tuple[Gateway, Gateway]) -> None:
    """Its turns are on different workers, as happens if one is full."""
    first, second = gateways
    ask: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Tell a story."}],
        "stream": True, "temperature": 0, "ignore_eos": True, "max_tokens": 40,
    }  # fmt: skip
    named = {"x-conversation-id": "talk"}
    old = await call(first, "/v1/chat/completions", {**ask, "model": "one"}, headers=named)
    await asyncio.sleep(1.1)  # times in a lookup are whole seconds
    longer = {**ask, "model": "two", "max_tokens": 900}
    await call(first, "/v1/chat/completions", longer, headers=named, leave_after_chunks=2)
    listed = (await call(second, "/v1/streams/lookup", {"conversation_ids": ["talk", "x"]})).json
    assert [each["conversation_id"] for each in listed] == ["talk"]
    got = await call(second, "/v1/stream", query=b"conv_id=talk&from=0", leave_after_chunks=2)
    assert got.status == 200 and b'"model":"two"' in got.body
    ended = await call(second, "/v1/stream", method="DELETE", query=b"conv_id=talk")
    assert (ended.status, ended.body) == (204, b"")
    listed = (await call(first, "/v1/streams/lookup", {"conversation_ids": ["talk"]})).json
    assert listed == [] and b"data: [DONE]\n" in old.body


async def test_only_its_owner_may_read_a_stream(gateways: tuple[Gateway, Gateway]) -> None:
    """At a worker, all clients use the gateway's token."""
    first, second = gateways
    ask = {"messages": [{"role": "user", "content": "Hi."}], "stream": True, "max_tokens": 5}
    mine, name = {"authorization": "Bearer mine"}, {"x-conversation-id": "secret"}
    whole = await call(first, "/v1/chat/completions", ask, headers={**mine, **name})
    query, lookup = b"conv_id=secret", {"conversation_ids": ["secret"]}
    for other in {}, {"authorization": "Bearer other"}, {"x-llorch-owner": "mine"}:
        got = await call(second, "/v1/stream", query=query, headers=other)
        assert got.status == 404
        assert (await call(second, "/v1/streams/lookup", lookup, headers=other)).json == []
        await call(second, "/v1/stream", method="DELETE", query=query, headers=other)
    got = await call(second, "/v1/stream", query=query, headers=mine)
    assert (got.status, got.body) == (200, whole.body)


async def test_a_stream_resumed_at_its_end_is_empty(gateways: tuple[Gateway, Gateway]) -> None:
    first, second = gateways
    whole = await call(first, "/execute", {**JOB, "max_tokens": 5, "job_id": "e"}, headers=RESUME)
    query = f"conv_id={whole.headers['x-llorch-resume']}&from={len(whole.body)}".encode()
    got = await call(second, "/v1/stream", query=query)
    assert (got.status, got.body, got.ended) == (200, b"", True)


async def test_reasoning_is_ended_wherever_it_is(gateways: tuple[Gateway, Gateway]) -> None:
    first, second = gateways
    body: dict[str, Any] = {
        "model": "two", "messages": [{"role": "user", "content": "Think."}], "stream": True,
        "max_tokens": 900, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    cut = await call(first, "/v1/chat/completions", body, headers=RESUME, leave_after_chunks=3)
    id = events(cut.body)[0]["id"]
    order = {"id": id, "action": "reasoning_end"}
    assert (await call(second, "/v1/chat/completions/control", order)).json["success"] is True
    got = await call(second, "/v1/stream", query=f"conv_id={id}".encode())
    deltas = [each["choices"][0]["delta"] for each in events(got.body) if each["choices"]]
    assert any(each.get("reasoning_content") for each in deltas)
    assert any(each.get("content") for each in deltas)
    got = await call(second, "/v1/chat/completions/control", {**order, "id": "nobody"})
    assert got.status == 200 and got.json["success"] is False and "nobody" not in got.json
    wrong = await call(second, "/v1/chat/completions/control", {"id": id})
    assert wrong.status == 400 and "action" in wrong.body.decode()
