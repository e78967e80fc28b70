"""Situations that need a scripted engine: silence, stalls, odd frames and errors in mid-stream."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from tests.support.scripted_api import ScriptedFactory, story
from tests.support.sse import Stream, collect
from tests.support.worker import asking, until
from worker.api.http import connection
from worker.errors import (
    ContextLengthExceeded,
    DuplicateJob,
    EngineCrashed,
    InferenceTimeout,
    NotReady,
    QueueFull,
    ShuttingDown,
    WorkerError,
)
from worker.observability.metrics import Metrics
from worker.supervisor.job import Job, StreamEvent
from worker.wire.messages import Accepted, Finished, PromptScored, Started, Token, TokenLogprob
from worker.wire.sampling import Sampling
from worker.wire.work import InferenceRequest

JOB = {"job_id": "job-1", "prompt": "Once"}


def execute(base_url: str, **fields: object) -> Stream:
    return collect([httpx.post(f"{base_url}/execute", json=JOB | fields).content])


def test_a_frame_of_several_events_arrives_in_order(scripted: ScriptedFactory) -> None:
    worker = scripted()
    worker.supervisor.script = [
        [Started(0, 2), Token(0, "a", (7, 8)), Token(0, "é\u2028\x85\n", (9,))],
        [Token(0, '"', (1,)), Finished(0, "STOP_SEQUENCE", 4, 12.5, "END")],
    ]
    answer = httpx.post(f"{worker.base_url}/execute", json=JOB | {"seed": 5})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    stream = collect([answer.content])
    assert len(answer.text.splitlines()) == answer.text.count("\n")
    assert stream.text == 'aé\u2028\x85\n"'
    assert [event["ids"] for event in stream.named("token")] == [[7, 8], [9], [1]]
    started = stream.events[0]
    assert started["job_id"] == "job-1" and started["seed"] == 5 and started["cached_tokens"] == 2
    assert started["started_at"].endswith("Z") and started["prompt_tokens"] == 3
    assert stream.events[-1] == {
        "type": "end",
        "tokens_out": 4,
        "decode_time_ms": 12.5,
        "stop_reason": "STOP_SEQUENCE",
        "stop_sequence_matched": "END",
        "seed": 5,
    }


def test_comments_keep_a_queued_stream_alive(scripted: ScriptedFactory) -> None:
    worker = scripted(keepalive=0.05)
    worker.supervisor.script = [1.5, *story("a")]
    stream = execute(worker.base_url)
    assert 6 <= stream.comments <= 35, "30, fewer where the machine is held up meanwhile"
    assert stream.text == "a"


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/api/chat", {"model": "m", "messages": [{"role": "user", "content": "x"}]}, "done"),
        ("/v1/inference", {"prompt": "Once"}, "stop_reason"),
    ],
)
def test_spaces_keep_a_queued_stream_of_lines_alive(
    scripted: ScriptedFactory, path: str, body: dict[str, object], last: str
) -> None:
    worker = scripted(keepalive=0.05)
    worker.supervisor.script = [1.5, *story("a")]
    accept = {"accept": "application/x-ndjson"}
    answer = httpx.post(f"{worker.base_url}{path}", json=body, headers=accept)
    assert 6 <= len(answer.text) - len(answer.text.lstrip(" ")) <= 35
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "error" not in lines[-1] and lines[-1][last]


def test_a_call_that_is_sent_once_complete_is_no_silence(scripted: ScriptedFactory) -> None:
    """Ollama's clients get a call as one line. A proxy must not end the stream meanwhile."""
    worker = scripted(keepalive=0.1)
    call = '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 20 + '"}}</tool_call>'
    script = story(*call)
    worker.supervisor.script = [part for frame in script for part in (frame, 0.02)]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }
    answer = httpx.post(f"{worker.base_url}/api/chat", json=body)
    lines = answer.text.splitlines()
    [call_line] = [line for line in lines if json.loads(line)["message"].get("tool_calls")]
    assert len(call_line) - len(call_line.lstrip(" ")) >= 3


def test_keepalive_zero_is_off(scripted: ScriptedFactory) -> None:
    worker = scripted(keepalive=0, slow_reader_timeout=0.2)
    worker.supervisor.script = [0.3, *story("a")]
    assert execute(worker.base_url).comments == 0


def test_metrics_events_come_at_their_interval(scripted: ScriptedFactory) -> None:
    worker = scripted(metrics_interval_ms=250)
    frames = story(*"abcdefghij")
    worker.supervisor.script = [part for frame in frames for part in (frame, 0.08)]
    began = time.monotonic()
    metrics = execute(worker.base_url).named("metrics")
    assert 2 <= len(metrics) <= (time.monotonic() - began) / 0.25
    assert all(m["job_id"] == "job-1" and m["tokens_out"] >= 1 for m in metrics)
    assert [m["tokens_out"] for m in metrics] == sorted(m["tokens_out"] for m in metrics)
    assert all(m["vram_bytes"] == 0 and m["decode_time_ms"] > 0 for m in metrics)


@pytest.mark.parametrize(
    "error",
    [
        EngineCrashed("the engine died"),
        InferenceTimeout("the deadline passed"),
        ShuttingDown("the worker stops"),
    ],
)
def test_a_failure_in_mid_stream_is_the_one_last_event(
    scripted: ScriptedFactory, error: WorkerError
) -> None:
    worker = scripted()
    worker.supervisor.script = [*story("a", "b")[:-1], error]
    stream = execute(worker.base_url)
    assert stream.events[-1] == {
        "type": "error",
        "code": error.code,
        "message": error.message,
        "retriable": True,
    }


@pytest.mark.parametrize(
    ("refusal", "status", "headers"),
    [
        (QueueFull("the queue is full", retry_after_seconds=2.6), 503, {"retry-after": "3"}),
        (NotReady("the model is loading", phase="load", percent=40.0), 503, {}),
        (DuplicateJob("that job runs"), 409, {}),
        (ContextLengthExceeded("too long", prompt_tokens=9, context_length=8), 400, {}),
        (InferenceTimeout("passed"), 504, {}),
    ],
)
def test_a_refusal_comes_before_the_stream(
    scripted: ScriptedFactory, refusal: WorkerError, status: int, headers: dict[str, str]
) -> None:
    worker = scripted()
    worker.supervisor.refusal = refusal
    answer = httpx.post(
        f"{worker.base_url}/execute", json=JOB, headers={"X-Correlation-Id": "abc<> 1"}
    )
    assert answer.status_code == status
    body = answer.json()
    assert body["code"] == refusal.code and body["retriable"] is refusal.retriable
    assert body["correlation_id"] == answer.headers["x-correlation-id"] == "abc1"
    for name, value in headers.items():
        assert answer.headers[name] == value
    for name, detail in refusal.details.items():
        assert body[name] == detail


@pytest.mark.parametrize("path", ["/execute", "/v1/inference"])
def test_a_client_that_leaves_cancels_its_job(
    scripted: ScriptedFactory, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """In the middle of a stream, or of a whole answer."""
    monkeypatch.setattr(connection, "HALF_CLOSED_SECONDS", 0.1)
    worker = scripted()
    worker.supervisor.script = [*story("a")[:-1], 60.0]

    def has_begun() -> bool:
        return any(job.tokens_out for job in [*worker.supervisor.jobs.values()])

    with asking(worker.port, path, JOB):
        until(has_begun, lambda: "no token was told")
    until(lambda: worker.supervisor.cancelled == ["job-1"], lambda: "it is not cancelled")


def test_a_request_that_can_never_fit_is_refused_by_the_limit(scripted: ScriptedFactory) -> None:
    """Retrying would not help, because no queue is long enough."""
    worker = scripted(slots=2, max_queued_requests=500)
    body = {"prompt": ["Once"] * 256, "n": 2, "max_tokens": 1}
    answer = httpx.post(f"{worker.base_url}/v1/completions", json=body)
    assert answer.status_code == 400 and "retry-after" not in answer.headers
    error = answer.json()["error"]
    assert error["param"] == "n" and error["message"].endswith("runs and queues at most 502")
    body["prompt"] = ["Once"] * 251
    assert httpx.post(f"{worker.base_url}/v1/completions", json=body).status_code == 200


def test_only_the_last_chunk_has_the_word_usage(scripted: ScriptedFactory) -> None:
    """Clients of llama-server take every chunk that contains the word for the one with the
    numbers."""
    worker = scripted()
    worker.supervisor.script = story("a", "b")
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = httpx.post(f"{worker.base_url}/v1/chat/completions", json=body)
    *chunks, last, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    assert len(chunks) == 4 and not any('"usage"' in chunk for chunk in chunks)
    usage = json.loads(last.removeprefix("data: "))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 3)


def test_parts_of_scores_are_one_event_and_another_engine_begins_anew() -> None:
    a, b, c = (TokenLogprob(number, b"x", -1.0) for number in range(3))
    work = InferenceRequest("j", "abc", Sampling(1), max_tokens=0)
    job = Job(1, work, Metrics("w"), lambda job, error: None)
    job.accept(Accepted(1, 3, b""))
    assert job.gather(PromptScored(1, (a,), 2)) is None
    job.submission()  # its engine has died
    assert job.gather(PromptScored(1, (a, b), 1)) is None
    assert job.gather(PromptScored(1, (c,), 0)) == PromptScored(1, (a, b, c))


def test_an_echo_is_sent_once_whatever_engines_die(scripted: ScriptedFactory) -> None:
    worker = scripted()
    scored = PromptScored(0, (TokenLogprob(1, b"Once", -1.0),))
    after_a_crash: list[StreamEvent]
    after_a_crash = [Started(0, 0), scored, Token(0, "b", (2,)), Finished(0, "EOS", 2, 1.0)]
    worker.supervisor.script = [
        [Started(0, 0), scored, Token(0, "a", (1,))],
        lambda job: job.continued(list(after_a_crash)),
    ]
    body = {"prompt": "Once", "echo": True, "logprobs": 1, "prompt_logprobs": 1, "stream": True}
    answer = httpx.post(f"{worker.base_url}/v1/completions", json=body)
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line[6:7] == "{"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "Onceab"
    assert sum("prompt_logprobs" in choice for choice in choices) == 1
