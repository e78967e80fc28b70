"""`/status` and `/slots` of a real worker: what it does now, without anything of a text."""

from __future__ import annotations

from typing import Any

from tests.support.worker import WorkerProcess, until

FOX = "Once upon a time, there was a brave fox named"


def test_a_running_request_is_told_in_counts(worker: WorkerProcess) -> None:
    with worker.streaming(FOX, max_tokens=800, ignore_eos=True) as response:
        chunks = response.iter_raw()
        next(chunks)
        now: dict[str, Any] = {}

        def decodes() -> bool:
            now.update(worker.get("/status").json())
            return any(each["doing"] == "decoding" for each in now["requests"])

        until(decodes, 60, lambda: str(now))
        (request,) = now["requests"]
        assert request["computed_tokens"] == request["prompt_tokens"] > 5
        assert request["tokens_out"] > 0 and now["running"] == 1 and now["queued"] == 0
        busy = [slot for slot in worker.get("/slots").json() if slot["is_processing"]]
        assert len(busy) == 1
        assert busy[0]["n_prompt_tokens"] == request["prompt_tokens"]
        assert busy[0]["next_token"][0]["n_decoded"] >= request["tokens_out"]
        assert "fox" not in worker.get("/status").text + worker.get("/slots").text
        for _ in chunks:
            continue
    worker.wait_idle()
    assert worker.get("/status").json()["requests"] == []


def test_refusals_are_told_newest_first_and_quote_no_body(worker: WorkerProcess) -> None:
    worker.post("/v1/completions", {"prompt": FOX, "max_tokens": "many foxes"})
    worker.post("/v1/chat/completions", {"messages": []})
    refusals = worker.get("/status").json()["refusals"]
    assert [each["path"] for each in refusals[:2]] == ["/v1/chat/completions", "/v1/completions"]
    assert refusals[0]["reason"] == "messages (minItems)"
    assert refusals[1]["reason"] == "max_tokens (type)"
    assert {each["status"] for each in refusals[:2]} == {400}
    assert "foxes" not in worker.get("/status").text


def test_memory_by_part_is_the_plan(worker: WorkerProcess) -> None:
    plan = worker.get("/info").json()["engine"]["plan"]
    parts = {each["part"]: each["bytes"] for each in worker.get("/status").json()["memory"]}
    kv = sum(parts.pop(f"kv_{name}") for name in ("used", "cached", "free"))
    assert parts | {"kv": kv} == plan
