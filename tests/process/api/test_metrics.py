"""`/metrics`, `/status` and `/slots`: names that dashboards rely on, and consistent figures."""

from __future__ import annotations

import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import ROOT
from tests.conftest import StartWorker
from tests.support.held import holding, mid_stream
from tests.support.scripted_api import ScriptedFactory
from tests.support.worker import WorkerProcess, asking, until

# Renaming or removing one of these breaks somebody's dashboard; added ones must be kept, too.
FROZEN = {
    "counter": """worker_requests_total worker_requests_rejected_total worker_tokens_in_total
        worker_tokens_cached_total worker_tokens_generated_total worker_slow_readers_total
        worker_engine_crashes_total worker_engine_respawns_total worker_requests_quarantined_total
        worker_callback_failures_total worker_heartbeats_total vllm:prefix_cache_queries_total
        vllm:prefix_cache_hits_total vllm:gpu_prefix_cache_queries_total
        vllm:gpu_prefix_cache_hits_total worker_key_requests_total worker_connections_cut_total
        worker_tokens_reused_total""",
    "histogram": """worker_inference_duration_ms worker_queue_wait_seconds
        worker_time_to_first_token_seconds worker_inter_token_seconds worker_cancel_latency_seconds
        worker_model_load_seconds""",
    "gauge": """worker_vram_bytes worker_uptime_seconds worker_ready worker_resident
        worker_requests_running worker_queue_depth worker_queue_prompt_tokens worker_kv_cells_used
        worker_kv_cells_total worker_kv_cells_cached worker_last_progress_ms
        worker_last_load_seconds worker_engine_decode_seconds worker_engine_overhead_seconds
        worker_engine_sample_seconds worker_engine_tokens_drafted worker_engine_tokens_accepted
        worker_engine_steps vllm:num_requests_waiting vllm:num_requests_running
        vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc vllm:cache_config_info
        vllm:gpu_prefix_cache_hit_rate vllm:lora_requests_info worker_engine_media_encoded
        worker_engine_encode_seconds""",
}
"""Names by kind; routers read those of vLLM."""
FOX = "Once upon a time, there was a brave fox named"
CACHED, REUSED = "worker_tokens_cached_total", "worker_tokens_reused_total"
REFUSED = "worker_requests_rejected_total"
CANCELLED = 'worker_requests_total{outcome="cancelled"}'
ENDED = "worker_inference_duration_ms_count"
TOKEN = "s3cret-of-the-worker"
PREFIX_CACHE = ("vllm:prefix_cache", "vllm:gpu_prefix_cache")


def test_names_and_kinds_are_frozen(worker: WorkerProcess) -> None:
    answer = worker.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    kinds = dict(
        line.removeprefix("# TYPE ").split(" ")
        for line in answer.text.splitlines()
        if line.startswith("# TYPE ")
    )
    frozen = {name: kind for kind, names in FROZEN.items() for name in names.split()}
    assert frozen == kinds
    for line in answer.text.splitlines():
        assert line.startswith("#") or float(line.rsplit(" ", 1)[1]) >= 0


def test_a_request_is_counted_once_everywhere(worker: WorkerProcess) -> None:
    worker.wait_idle()
    names = [
        'worker_requests_total{outcome="success"}',
        "worker_tokens_in_total",
        "worker_tokens_generated_total",
        "worker_inference_duration_ms_count",
        "worker_queue_wait_seconds_count",
        "worker_time_to_first_token_seconds_count",
        "worker_inter_token_seconds_count",
    ]
    before = {name: worker.metric(name) for name in names}
    worker.execute("Once upon a time", max_tokens=200, ignore_eos=True)
    added = {name: worker.metric(name) - before[name] for name in names}
    *others, inter_token = added.values()
    assert others == [1, 5, 200, 1, 1, 1]
    assert 1 <= inter_token <= 199, "those that came together with the first are not apart"


def test_tokenizing_and_detokenizing_do_not_count_as_requests(worker: WorkerProcess) -> None:
    """An embedding with texts to truncate counted once for each, and its time as an inference's."""
    worker.wait_idle()
    names = ['worker_requests_total{outcome="success"}', "worker_inference_duration_ms_count"]
    before = [worker.metric(name) for name in names]
    body = {"prompt": [[9, 8, 7], [9, 8]], "echo": True, "max_tokens": 1}
    assert worker.post("/v1/completions", body).status_code == 200
    assert worker.post("/tokenize", {"content": FOX}).status_code == 200
    assert [worker.metric(name) - was for name, was in zip(names, before, strict=True)] == [2, 2]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": FOX * 4, "n": 3},
        {"prompt": [FOX * 4, "The fox"], "n": 2},
        {"prompt": FOX * 4, "stop": [" and", " the", " a", ". "], "n": 2},
    ],
)
def test_the_token_counters_grow_by_the_usage_of_the_answer(
    worker: WorkerProcess, fields: dict[str, Any]
) -> None:
    of_prompts = ("worker_tokens_in_total", *(f"{each}_queries_total" for each in PREFIX_CACHE))
    of_the_cache = (CACHED, REUSED, *(f"{each}_hits_total" for each in PREFIX_CACHE))
    names = ("worker_tokens_generated_total", *of_prompts, *of_the_cache)

    def counts() -> list[float]:
        worker.wait_idle()
        text = worker.get("/metrics").text
        return [sum_of(name, text) for name in names]

    body = {"max_tokens": 60, "temperature": 0, **fields}
    worker.answer("/v1/completions", body)  # so that the second time much is cached
    before = counts()
    usage = worker.answer("/v1/completions", body)["usage"]
    after = counts()
    added = [now - was for now, was in zip(after, before, strict=True)]
    cached, prompt = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
    assert added == [usage["completion_tokens"], *[prompt] * 3, *[cached] * 4] and cached > 0
    rate = worker.metric("vllm:gpu_prefix_cache_hit_rate")
    assert rate == pytest.approx(after[-1] / after[2])


def sum_of(name: str, exposition: str) -> float:
    """Sum all series of a metric."""
    lines = [line for line in exposition.splitlines() if line.partition("{")[0].split()[0] == name]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_gauges_are_the_engines(worker: WorkerProcess) -> None:
    worker_id = worker.get("/info").json()["worker_id"]
    health = worker.get("/health").json()
    assert (
        worker.metric(f'worker_vram_bytes{{worker_id="{worker_id}"}}')
        == (health["vram_bytes_used"])
    )
    assert worker.metric("worker_kv_cells_total") >= 16 * 1024
    cells = int(worker.metric("worker_kv_cells_total"))
    cache = f'vllm:cache_config_info{{block_size="1",num_gpu_blocks="{cells}"}}'
    assert worker.metric(cache) == 1
    worker.wait_idle()
    worker.wait_metric("vllm:kv_cache_usage_perc", 0)
    assert worker.metric("worker_ready") == worker.metric("worker_resident") == 1
    assert worker.metric("worker_uptime_seconds") >= health["uptime_seconds"]
    assert worker.metric("worker_model_load_seconds_count") >= 1


@pytest.mark.parametrize(
    ("request_of", "code"),
    [
        ({"json": {"prompt": FOX, "max_tokens": "many"}}, "INVALID_REQUEST"),
        ({"content": b"{", "headers": {"Content-Type": "application/json"}}, "INVALID_REQUEST"),
        ({"json": {"prompt": FOX, "grammar": "root ::= ("}}, "INVALID_REQUEST"),
        ({"json": {"prompt": FOX}, "headers": {"Origin": "https://evil.example"}}, "FORBIDDEN"),
        ({"json": {"prompt": FOX}, "headers": {"Authorization": "Bearer other"}}, "UNAUTHORIZED"),
        ({"content": b" " * 1_000_001}, "PAYLOAD_TOO_LARGE"),
        ({"method": "DELETE"}, "METHOD_NOT_ALLOWED"),
        ({"url": "/v1/nothing"}, "NOT_FOUND"),
    ],
)
def test_each_refused_request_is_counted_once_by_its_code(
    scripted: ScriptedFactory, request_of: dict[str, Any], code: str
) -> None:
    worker = scripted(worker_token=TOKEN, max_body_bytes=1_000_000)
    key = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    request = {"method": "POST", "url": "/v1/completions", **request_of}
    request["headers"] = key | request.get("headers", {})
    with httpx.Client(base_url=worker.base_url) as client:
        assert client.request(**request).status_code >= 400
        assert refusals(client) == {f'{REFUSED}{{code="{code}"}}': 1}


def test_the_counter_of_each_refusal_begins_at_zero(
    scripted: ScriptedFactory, tmp_path: Path
) -> None:
    """A rate misses the first refusal if the series begins at 1."""
    page = (ROOT / "docs/api.md").read_text("utf-8")
    codes = re.findall(r"^\| `([A-Z_]+)` \| \d{3} \|", page, re.MULTILINE)
    names = [f'{REFUSED}{{code="{code}"}}' for code in codes]
    (keys := tmp_path / "keys").write_text(f"team:{TOKEN}\n")
    worker = scripted(worker_token="other", api_key_file=str(keys))
    names += [f'worker_key_requests_total{{key="{name}"}}' for name in ("team", "token")]
    with httpx.Client(base_url=worker.base_url) as client:
        lines = client.get("/metrics").text.splitlines()
    assert len(codes) > 15 and {f"{name} 0.0" for name in names} <= {*lines}


def test_a_request_that_the_engine_refuses_is_counted_once_by_its_code(
    worker: WorkerProcess,
) -> None:
    with worker.client() as client:
        before = refusals(client)
        assert client.post("/v1/completions", json={"prompt": "fox " * 2000}).status_code == 400
        name = f'{REFUSED}{{code="CONTEXT_LENGTH_EXCEEDED"}}'
        assert refusals(client) == before | {name: before.get(name, 0) + 1}


def test_the_log_has_why_a_request_was_refused(worker: WorkerProcess) -> None:
    """The status does not distinguish a prompt that is too long from a wrong field."""
    codes: dict[str, str | None] = {}
    bodies: list[tuple[str | None, dict[str, Any]]] = [
        ("CONTEXT_LENGTH_EXCEEDED", {"prompt": "x" * 50_000}),
        ("INVALID_REQUEST", {"prompt": 1.5}),
        (None, {"prompt": FOX, "max_tokens": 1}),
    ]
    for code, body in bodies:
        codes[worker.post("/v1/completions", body).headers["x-correlation-id"]] = code

    def logged() -> dict[str, str | None]:
        lines = {each["correlation_id"]: each["code"] for each in worker.logs("request.answered")}
        return {id: code for id, code in lines.items() if id in codes}

    # A log line comes after its answer.
    until(lambda: len(logged()) == len(codes), lambda: worker.stderr[-2000:], worker)
    assert logged() == codes


def test_the_log_has_which_part_of_a_request_took_long(worker: WorkerProcess) -> None:
    worker.post("/v1/completions", {"prompt": FOX, "max_tokens": 4, "ignore_eos": True})
    ended = worker.logs("request.ended")[-1]
    assert 0 < ended["queue_ms"] <= ended["first_token_ms"] <= ended["duration_ms"]


def refusals(client: httpx.Client) -> dict[str, float]:
    """Return the nonzero counts."""
    lines = client.get("/metrics").text.splitlines()
    series = (each.rsplit(" ", 1) for each in lines if each.startswith(REFUSED))
    return {name: float(n) for name, n in series if float(n)}


def test_a_probe_for_an_unknown_stream_or_job_is_no_refusal(worker: WorkerProcess) -> None:
    """A fleet's gateway asks all workers, most of which do not have it."""
    with worker.client() as client:
        before, listed = refusals(client), client.get("/status").json()["refusals"]
        for path in ("/execute/no-such-job", "/v1/stream?conv_id=none"):
            assert client.head(path).status_code == 404
        assert client.post("/cancel", json={"job_id": "no-such-job"}).status_code == 404
        assert refusals(client) == before
        assert client.get("/status").json()["refusals"] == listed


def test_a_request_that_times_out_after_it_was_accepted_is_no_refusal(
    worker: WorkerProcess,
) -> None:
    body = {"prompt": FOX, "max_tokens": 8000, "ignore_eos": True}
    timeouts = 'worker_requests_total{outcome="timeout"}'
    with worker.client() as client, ThreadPoolExecutor(1) as pool:
        is_accepted, seconds = False, 1.5
        while not is_accepted:  # a busy machine needs more time
            seconds *= 2
            listed = client.get("/status").json()["refusals"]
            before, refused_before = worker.metric(timeouts), refusals(client)
            soon = {"X-Deadline": str(int((time.time() + seconds) * 1000))}
            with holding(worker.hold):  # otherwise the answer may be complete in time
                pending = pool.submit(client.post, "/v1/completions", json=body, headers=soon)
                while not (pending.done() or is_accepted):
                    is_accepted = client.get("/health").json()["running"] == 1
                    time.sleep(0.02)
                assert pending.result().status_code == 504
        assert worker.metric(timeouts) == before + 1
        assert refusals(client) == refused_before
        assert client.get("/status").json()["refusals"] == listed


def test_an_answer_of_one_token_counts_in_the_time_to_the_first_token(
    worker: WorkerProcess,
) -> None:
    worker.wait_idle()
    names = [
        f"worker_{name}_count" for name in ("time_to_first_token_seconds", "queue_wait_seconds")
    ]
    before = [worker.metric(name) for name in names]
    body = {"prompt": FOX, "temperature": 0, "stop": [" "], "max_tokens": 9}
    usage = worker.post("/v1/completions", body).json()["usage"]
    assert usage["completion_tokens"] == 1
    assert [worker.metric(name) - was for name, was in zip(names, before, strict=True)] == [1, 1]


@pytest.fixture
def narrow(share_worker: StartWorker) -> WorkerProcess:
    """A worker for one request at a time, with a queue of two."""
    return share_worker("--slots", "1", "--max-queued-requests", "2", can_be_held=True)


def test_slots_is_503_on_request_if_none_is_idle(narrow: WorkerProcess) -> None:
    """As in llama-server, for load balancers."""
    worker = narrow
    path = "/slots?fail_on_no_slot=1"
    assert worker.get(path).json()[0]["is_processing"] is False
    with mid_stream(worker, FOX, max_tokens=900, ignore_eos=True):
        refused = worker.get(path)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert worker.get("/slots").json()[0]["is_processing"] is True


def test_choices_without_room_in_the_queue_are_refused_together(narrow: WorkerProcess) -> None:
    """Before, those before the first one without room were computed, and counted as cancelled."""
    worker, names = narrow, (CANCELLED, f'{REFUSED}{{code="QUEUE_FULL"}}', ENDED)
    before = [worker.metric(name) for name in names]
    with mid_stream(worker, FOX, max_tokens=900, ignore_eos=True):
        refused = worker.post("/v1/completions", {"prompt": FOX, "n": 3})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "queue_full"
    worker.wait_metric(CANCELLED, before[0] + 1)
    assert [worker.metric(name) - was for name, was in zip(names, before, strict=True)] == [1] * 3

    worker.freeze_engine()
    with asking(worker.port, "/v1/completions", {"prompt": FOX, "n": 3}):
        until(lambda: worker.n_queued > 0, lambda: "it has not come", worker)
    worker.wait_queued(0)
    worker.thaw_engine()
    assert worker.post("/v1/completions", {"prompt": FOX, "n": 3}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_of_more_prompt_tokens_than_may_wait_is_answered(
    share_worker: StartWorker, stream: bool
) -> None:
    worker = share_worker("--slots", "1", "--max-queued-prompt-tokens", "1000")
    before = worker.metric("worker_tokens_in_total")
    prompts = [f"{number} foxes ran " * 40 for number in range(20)]
    body = {"prompt": prompts, "n": 2, "max_tokens": 2, "ignore_eos": True, "stream": stream}
    answer = worker.post("/v1/completions", body)
    assert answer.status_code == 200 and answer.text.count('"finish_reason":"length"') == 40
    assert worker.metric("worker_tokens_in_total") - before > 3000
    assert worker.metric(CANCELLED) == 0


def test_a_running_request_is_reported_in_counts_without_its_text(worker: WorkerProcess) -> None:
    worker.wait_idle()
    with mid_stream(worker, FOX, max_tokens=400, ignore_eos=True):
        now: dict[str, Any] = {}

        def decodes() -> bool:
            now.update(worker.get("/status").json())
            return any(each["doing"] == "decoding" for each in now["requests"])

        until(decodes, lambda: str(now))
        (request,) = now["requests"]
        assert request["computed_tokens"] == request["prompt_tokens"] > 5
        assert request["tokens_out"] > 0 and now["running"] == 1 and now["queued"] == 0
        busy = [slot for slot in worker.get("/slots").json() if slot["is_processing"]]
        assert len(busy) == 1
        assert busy[0]["n_prompt_tokens"] == request["prompt_tokens"]
        assert busy[0]["next_token"][0]["n_decoded"] >= request["tokens_out"]
        assert worker.get("/slots?fail_on_no_slot=1").status_code == 200
        assert "fox" not in worker.get("/status").text + worker.get("/slots").text
    worker.wait_idle()
    assert worker.get("/status").json()["requests"] == []


def test_a_preempted_request_counts_as_one_that_waits(start_worker: StartWorker) -> None:
    """Otherwise routers see no queue although a request is waiting."""
    flags = ("--slots", "2", "--kv-unified", "--kv-cells", "256", "--context-length", "200")
    worker = start_worker(*flags, can_be_held=True)
    names = ("worker_requests_running", "vllm:num_requests_running", "worker_queue_depth",
             "vllm:num_requests_waiting")  # fmt: skip
    limits = {"max_tokens": 190, "ignore_eos": True}
    worker.hold.touch()
    with worker.streaming(FOX, **limits), worker.streaming("The sun", **limits):
        now: dict[str, Any] = {}

        def is_preempted() -> bool:
            worker.hold.touch()
            time.sleep(0.1)
            now.update(worker.get("/status").json())
            waiting = [each for each in now["requests"] if each["doing"] == "waiting"]
            return any(each["tokens_out"] for each in waiting)

        until(is_preempted, lambda: str(now))
        assert (now["running"], now["queued"], len(now["requests"])) == (1, 1, 2)
        assert [worker.metric(name) for name in names] == [1, 1, 1, 1]
        slots = worker.get("/slots?fail_on_no_slot=1").json()
        assert [slot["is_processing"] for slot in slots] == [True, False]
        worker.hold.unlink()
    worker.wait_idle()


def test_refusals_are_listed_newest_first_and_quote_no_body(worker: WorkerProcess) -> None:
    worker.post("/v1/completions", {"prompt": FOX, "max_tokens": "many foxes"})
    worker.post("/v1/chat/completions", {"messages": []})
    schema = {"type": "string", "pattern": "^(foxes$"}
    assert "foxes" in worker.post("/completion", {"prompt": "hi", "json_schema": schema}).text
    refusals = worker.get("/status").json()["refusals"][:3]
    assert [(each["path"], each["reason"]) for each in refusals] == [
        ("/completion", "json_schema (engine)"),
        ("/v1/chat/completions", "messages (minItems)"),
        ("/v1/completions", "max_tokens (type)"),
    ]
    assert {each["status"] for each in refusals} == {400}
    assert "foxes" not in worker.get("/status").text


def test_a_connection_that_does_not_speak_http_is_counted_and_logged(worker: WorkerProcess) -> None:
    cut = 'worker_connections_cut_total{reason="no_http"}'
    before = worker.metric(cut)
    with socket.create_connection(("127.0.0.1", worker.port), timeout=20) as client:
        client.sendall(b"SSH-2.0-client\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400")
    assert worker.metric(cut) == before + 1
    assert worker.wait_log("connection.cut")["reason"] == "no_http"


def test_memory_by_part_is_the_plan(worker: WorkerProcess) -> None:
    plan = worker.get("/info").json()["engine"]["plan"]
    parts = {each["part"]: each["bytes"] for each in worker.get("/status").json()["memory"]}
    kv = sum(parts.pop(f"kv_{name}") for name in ("used", "cached", "free"))
    assert parts | {"kv": kv} == plan
