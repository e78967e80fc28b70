"""The worker's own paths, on the real process with the bundled model."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from tests.support.held import holding, mid_stream
from tests.support.sse import collect
from tests.support.worker import WorkerProcess, new_job_id

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
FRANCE = CHAT.format("What is the capital of France?")


def greedy(**fields: object) -> dict[str, object]:
    return {"prompt": FRANCE, "temperature": 0, "max_tokens": 32, **fields}


def test_execute_streams_started_tokens_and_one_end(worker: WorkerProcess) -> None:
    stream = worker.execute(FRANCE, temperature=0, max_tokens=32)
    assert stream.text == "The capital of France is Paris."
    assert stream.end["stop_reason"] == "EOS"
    assert stream.end["tokens_out"] == len(stream.ids)  # without the end-of-generation token
    started = stream.events[0]
    assert started["model"] == worker.get("/health").json()["model"]
    assert started["prompt_tokens"] == 16 and started["started_at"].endswith("Z")


def test_inference_gives_the_stream_as_one_object(worker: WorkerProcess) -> None:
    stream = worker.execute(FRANCE, temperature=0, max_tokens=32, seed=7)
    body = worker.post("/v1/inference", greedy(seed=7)).json()
    assert body["text"] == stream.text and body["tokens"] == stream.ids
    assert body["stop_reason"] == "EOS" and body["tokens_out"] == stream.end["tokens_out"]
    assert body["seed"] == 7 and body["job_id"] and "type" not in body


def test_inference_streams_ndjson_on_request(worker: WorkerProcess) -> None:
    answer = worker.post("/v1/inference", greedy(), {"Accept": "application/x-ndjson"})
    assert answer.headers["content-type"] == "application/x-ndjson"
    events = [json.loads(line) for line in answer.text.split("\n")[:-1]]
    assert [event["type"] for event in (events[0], events[1], events[-1])] == [
        "started",
        "token",
        "end",
    ]
    assert "".join(e["t"] for e in events if e["type"] == "token").endswith("Paris.")


def test_inference_stream_makes_a_job_id(worker: WorkerProcess) -> None:
    stream = collect([worker.post("/v1/inference/stream", greedy()).content])
    assert len(stream.events[0]["job_id"]) == 36
    assert stream.text.endswith("Paris.")


def test_detokenize_inverts_tokenize(worker: WorkerProcess) -> None:
    text = "Zoë met a 🦔.<|im_end|>"
    tokens = worker.post("/tokenize", {"content": text}).json()["tokens"]
    assert tokens[-1] == 2, "a special token in the text is recognised"
    assert worker.post("/detokenize", {"tokens": tokens}).json() == {"content": text}
    with_bos = worker.post("/tokenize", {"content": text, "add_special": True}).json()["tokens"]
    assert with_bos == [0, *tokens]


def test_apply_template_is_the_models_own(worker: WorkerProcess) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert worker.post("/apply-template", {"messages": messages}).json() == {"prompt": FRANCE}
    parts = [{"role": "user", "content": [{"type": "text", "text": messages[0]["content"]}]}]
    assert worker.post("/apply-template", {"messages": parts}).json() == {"prompt": FRANCE}
    call = {"name": "f", "arguments": r'{"half of a character": "\ud83e"}'}
    calling = {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
    refused = worker.post("/apply-template", {"messages": [*messages, calling]})
    assert refused.status_code == 400 and "U+D83E" in refused.json()["error"]["message"]
    bare = worker.post("/apply-template", {"messages": messages, "add_generation_prompt": False})
    assert bare.json() == {"prompt": FRANCE.removesuffix("<|im_start|>assistant\n")}


def test_a_running_job_id_is_refused_and_a_cancel_may_be_repeated(worker: WorkerProcess) -> None:
    job_id = new_job_id()
    body = {"job_id": job_id, "prompt": "Once", "max_tokens": 900, "ignore_eos": True}
    with (
        holding(worker.hold),
        httpx.stream("POST", f"{worker.base_url}/execute", json=body) as answer,
    ):
        parts = answer.iter_raw()
        begun = next(parts)
        second = worker.post("/execute", body | {"max_tokens": 1})
        assert second.status_code == 409 and second.json()["code"] == "DUPLICATE_JOB"
        for _ in range(2):  # a second cancel has the same answer
            assert worker.post("/cancel", {"job_id": job_id}).status_code == 202
        stream = collect([begun, *parts])
    assert stream.error["code"] == "CANCELLED" and stream.error["retriable"] is False
    assert worker.post("/cancel", {"job_id": job_id}).status_code == 202
    assert worker.post("/v1/inference", body | {"max_tokens": 1}).status_code == 200
    ended = worker.post("/cancel", {"job_id": job_id})
    assert ended.status_code == 202 and ended.json()["status"] == "cancelled", "by itself"


def test_metrics_events_have_speed_and_memory(worker: WorkerProcess) -> None:
    vram_bytes = worker.get("/health").json()["vram_bytes_used"]
    with mid_stream(worker, "Once", max_tokens=400, ignore_eos=True) as reading:
        while b"event: metrics" not in reading.seen:
            time.sleep(0.1)
            worker.hold.touch()  # some tokens more
            reading.seen += next(reading.chunks)
        worker.hold.unlink()
        event, *_ = reading.rest().named("metrics")
    assert event["vram_bytes"] == vram_bytes > 0
    assert event["tokens_out"] > 1 and event["tokens_per_sec"] > 0
    assert event["decode_time_ms"] > 0 and event["job_id"]


# --- deadlines ---------------------------------------------------------------------------


def test_a_past_deadline_is_a_504_before_any_work(worker: WorkerProcess) -> None:
    tokens_before = worker.metric("worker_tokens_in_total")
    in_seconds = time.time() + 60  # a mistake that the answer explains
    past = {"X-Deadline": str(int(in_seconds))}
    answer = worker.post("/v1/inference", greedy(), past)
    assert answer.status_code == 504 and "in milliseconds since 1970" in answer.json()["message"]
    assert answer.json()["code"] == "INFERENCE_TIMEOUT" and answer.json()["retriable"] is True
    assert worker.metric("worker_tokens_in_total") == tokens_before


@pytest.mark.parametrize(
    ("name", "value", "is_taken"),
    [
        *(("X-Deadline", value, False) for value in ("soon", "-5", "1.5", "9" * 30, "")),
        ("Content-Encoding", "gzip", False),
        ("Content-Encoding", "Identity", True),
    ],
)
def test_a_header_that_cannot_be_honoured_is_named(
    worker: WorkerProcess, name: str, value: str, is_taken: bool
) -> None:
    answer = worker.post("/v1/inference", greedy(), {name: value})
    assert answer.status_code == (200 if is_taken else 400)
    assert is_taken or answer.json()["errors"][0]["field"] == name


# --- state -------------------------------------------------------------------------------


def test_health_has_the_fields_of_the_contract(worker: WorkerProcess) -> None:
    body = worker.get("/health").json()
    assert body["status"] == "healthy" and body["resident"] is True
    assert body["quant_kind"] == "Q8_0" and body["tokenizer_kind"] == "gguf-bpe"
    assert body["vocab_size"] == 1024 and body["context_length"] == 1024
    assert body["backend"] == "cpu" and body["device"] == "CPU"
    assert body["vram_bytes_used"] > 2_600_000 and body["uptime_seconds"] > 0
    assert body["last_progress_ms"] >= 0


def test_ready_has_two_names(worker: WorkerProcess) -> None:
    worker.wait_idle()
    for path in ("/ready", "/v1/ready"):
        assert worker.get(path).json() == {"ready": True, "state": "idle"}


def test_loading_progress_of_a_loaded_worker_ends_at_once(worker: WorkerProcess) -> None:
    events = worker.get("/v1/loading/progress").text.strip().split("\n\n")
    assert len(events) == 1
    last = json.loads(events[0].split("data: ")[1])
    assert last["phase"] == "ready" and last["percent"] == 100.0
    assert "bytes_per_second" in last


def test_info_has_the_static_facts(worker: WorkerProcess) -> None:
    info = worker.get("/info").json()
    assert info["limits"]["slots"] == 16 and info["limits"]["max_tokens_out"] == 1024
    assert info["model"]["architecture"] == "llama" and len(info["model"]["metadata_sha256"]) == 64
    assert info["model"]["metadata"]["general.architecture"] == "llama"
    assert info["residency"]["resident"] is True and info["residency"]["buffers"]
    assert info["engine"]["versions"]["llama_cpp_python"].startswith("0.3.36")
    assert info["engine"]["device_total_bytes"] >= sum(info["engine"]["plan"].values())
    assert info["engine_crashes"] == []
    assert info["model"]["adapters"] == []
    assert info["engine"]["threads"] >= 1 and info["engine"]["cpu_variant"]
