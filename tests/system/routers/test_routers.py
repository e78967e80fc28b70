"""Routers from PyPI in front of three plain workers: answers, streams, distribution, cache hits, a
killed worker.

Answers through a router are compared with a worker's direct ones.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.worker import WorkerProcess
from tests.system.routers.routers import ROUTERS, routed

pytestmark = pytest.mark.long

FIELDS = {"model": "tiny-model", "temperature": 0, "max_tokens": 24}
COUNTRIES = ("France", "Italy", "Japan", "Brazil")
N_REQUESTS = 24


def question(country: str) -> dict[str, Any]:
    text = f"What is the capital of {country}?"
    return FIELDS | {"messages": [{"role": "user", "content": text}]}


def content(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def streamed(client: httpx.Client, body: dict[str, Any]) -> str:
    """Return the text of a streamed chat, whose stream must end like OpenAI's."""
    text, ends = "", []
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:]).get("choices", ()):
                    text += choice["delta"].get("content") or ""
                    ends += [choice["finish_reason"]] if choice.get("finish_reason") else []
            elif line.startswith("data:"):
                ends.append(line[5:].strip())
    assert ends in (["stop", "[DONE]"], ["length", "[DONE]"]), ends
    return text


def served_by(workers: list[WorkerProcess]) -> list[float]:
    return [worker.metric('worker_requests_total{outcome="success"}') for worker in workers]


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_serves_what_its_workers_do(
    name: str,
    routers_bin: Path,
    workers: list[WorkerProcess],
    tmp_path: Path,
    counts: list[str],
) -> None:
    bodies = [question(COUNTRIES[n % len(COUNTRIES)]) for n in range(N_REQUESTS)]
    direct = {
        country: content(workers[0].post("/v1/chat/completions", question(country)))
        for country in COUNTRIES
    }
    assert "Paris" in direct["France"]
    expected = [direct[COUNTRIES[n % len(COUNTRIES)]] for n in range(N_REQUESTS)]
    with routed(name, routers_bin, workers, tmp_path) as client:
        listed = [each["id"] for each in client.get("/v1/models").json()["data"]]
        # sglang's router asks SGLang's own paths for the name, and falls back to this.
        assert listed and set(listed) <= {"tiny-model", "unknown"}

        before = served_by(workers)
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda body: client.post("/v1/chat/completions", json=body), bodies)
            whole = sum(content(got) == want for got, want in zip(answers, expected, strict=True))
        spread = [now - was for now, was in zip(served_by(workers), before, strict=True)]
        with ThreadPoolExecutor(8) as pool:
            texts = pool.map(lambda body: streamed(client, body), bodies)
            streams = sum(got == want for got, want in zip(texts, expected, strict=True))
        completion = client.post(
            "/v1/completions", json=FIELDS | {"prompt": "Once upon a time", "max_tokens": 4}
        )
        assert completion.json()["choices"][0]["text"] == ", there was a"

        workers[2].kill()  # the last to start; any would do
        after = [client.post("/v1/chat/completions", json=body) for body in bodies]
        right = [
            answer.status_code == 200 and content(answer) == want
            for answer, want in zip(after, expected, strict=True)
        ]
    refused = sorted({answer.status_code for answer in after} - {200})
    counts.append(
        f"{name:<14} answers {whole} of {N_REQUESTS}, streams {streams} of {N_REQUESTS}, "
        f"by worker {'/'.join(f'{each:.0f}' for each in spread)}, "
        f"after a worker was killed {sum(right)} of {N_REQUESTS} {refused or ''}"
    )
    assert (whole, streams) == (N_REQUESTS, N_REQUESTS)
    assert sum(spread) == N_REQUESTS and sum(each > 0 for each in spread) >= 2
    # Requests that a router loses until it notices do not count; then it must serve.
    assert all(right[N_REQUESTS // 2 :]), right


@pytest.mark.parametrize("name", ["vllm-router", "sglang-router"])
def test_a_prefix_aware_router_finds_the_cache(
    name: str,
    routers_bin: Path,
    workers: list[WorkerProcess],
    tmp_path: Path,
    counts: list[str],
) -> None:
    """Three long prefixes, each with eight prompts that continue differently."""
    beginnings = [f"{name} story {n}: " + "once upon a time there was a fox. " * 12 for n in "abc"]
    with routed(name, routers_bin, workers, tmp_path, "cache_aware") as client:
        for turn in range(8):
            for beginning in beginnings:
                body = FIELDS | {"prompt": f"{beginning} {turn}", "max_tokens": 2}
                assert client.post("/v1/completions", json=body).status_code == 200
    queries, hits = (
        sum(worker.metric(f"vllm:gpu_prefix_cache_{each}_total") for worker in workers)
        for each in ("queries", "hits")
    )
    counts.append(f"{name:<14} prompt tokens found in a worker's cache {hits / queries:.0%}")
    # Seven of eight prompts can hit their prefix.
    assert hits / queries > 0.7
