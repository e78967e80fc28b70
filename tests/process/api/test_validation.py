"""Bad requests: all faults at once, each with its field, and never a word of the prompt."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.scripted_api import ScriptedFactory, ScriptedWorker
from tests.support.worker import WorkerProcess

JSON = {"Content-Type": "application/json"}
SECRET = "The fox hides under the third stone"


def faults_of(worker: WorkerProcess | ScriptedWorker, body: Any) -> dict[str, dict[str, Any]]:
    answer = httpx.post(f"{worker.base_url}/execute", json=body)
    assert answer.status_code == 400, answer.text
    answered = answer.json()
    assert answered["code"] == "INVALID_REQUEST" and answered["retriable"] is False
    assert answered["correlation_id"] == answer.headers["x-correlation-id"]
    assert SECRET not in answer.text
    return {fault["field"]: fault for fault in answered["errors"]}


def test_all_faults_come_at_once(worker: WorkerProcess) -> None:
    body = {
        "job_id": "",
        "prompt": [SECRET],
        "max_tokens": 1025,
        "temperature": 2.1,
        "top_p": -0.1,
        "top_k": 1025,
        "min_p": "0.5",
        "repetition_penalty": True,
        "stop": ["a", "", "b" * 101],
        "seed": 2**64,
        "ignore_eos": 1,
        "max_token": 5,
    }
    faults = faults_of(worker, body)
    assert {name: fault["constraint"] for name, fault in faults.items()} == {
        "job_id": "minLength",
        "prompt": "type",
        "max_tokens": "maximum",
        "temperature": "maximum",
        "top_p": "minimum",
        "top_k": "maximum",
        "min_p": "type",
        "repetition_penalty": "type",
        "stop[1]": "minLength",
        "seed": "maximum",
        "ignore_eos": "type",
        "max_token": "unknown",
    }
    assert faults["max_tokens"]["message"] == "max_tokens must be at most 1024"
    assert faults["max_tokens"]["value"] == 1025 and "value" not in faults["prompt"]
    assert "max_tokens" in faults["max_token"]["message"], "the closest name is told"


def test_required_fields_are_named(worker: WorkerProcess) -> None:
    assert {f["constraint"] for f in faults_of(worker, {}).values()} == {"required"}
    assert set(faults_of(worker, {})) == {"job_id", "prompt"}
    assert set(faults_of(worker, {"job_id": "x", "prompt": ""})) == {"prompt"}


@pytest.mark.parametrize(
    ("field", "edge", "beyond"),
    [
        ("max_tokens", 1024, 1025),
        ("max_tokens", 1, 0),
        ("top_k", 1024, 1025),
        ("seed", 2**64 - 1, -1),
        ("stop", ["a", "b", "c", "d"], ["a"] * 5),
        ("prompt", "a", ["a"]),
        ("seed", None, 1.5),
        ("max_tokens", 2.0, "2"),
        ("reasoning_budget", -1, -2),
    ],
)
def test_each_range_includes_its_limit_and_nothing_beyond(
    worker: WorkerProcess, field: str, edge: Any, beyond: Any
) -> None:
    body = {"prompt": "Once", "max_tokens": 1}
    assert worker.post("/v1/inference", body | {field: edge}).status_code == 200
    answer = worker.post("/v1/inference", body | {field: beyond})
    assert answer.status_code == 400
    assert [fault["field"] for fault in answer.json()["errors"]] == [field]


@pytest.mark.parametrize("stop", [5, True, {"a": 1}])
def test_an_invalid_stop_is_refused_with_both_valid_forms(worker: WorkerProcess, stop: Any) -> None:
    answer = worker.post("/v1/completions", {"prompt": "Once", "stop": stop})
    assert answer.status_code == 400
    fault = answer.json()["error"]["errors"][0]
    assert fault["message"] == "stop must be a text or a list of texts"
    assert fault["constraint"] == "type"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  \n",
        b"[]",
        b"5",
        b'"text"',
        b"{",
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"temperature": 1e999, "prompt": 5}',
        b'{"prompt":' * 300 + b"1" + b"}" * 300,
        b'{"prompt":' + b"[" * 70 + b"]" * 70 + b"}",
        b"[" * 100_000,
    ],
)
def test_a_body_that_is_not_a_valid_json_object_is_refused(
    worker: WorkerProcess, body: bytes
) -> None:
    for path in ("/v1/inference", "/v1/chat/completions", "/tokenize"):
        answer = httpx.post(f"{worker.base_url}{path}", content=body, headers=JSON)
        assert answer.status_code == 400, (path, answer.text)
        error = answer.json()
        code = error["error"]["code"] if "error" in error else error["code"].lower()
        assert code == "invalid_request"


def test_a_body_over_the_limit_is_refused(worker: WorkerProcess) -> None:
    limit = worker.get("/info").json()["limits"]["max_body_bytes"]
    refused = httpx.post(f"{worker.base_url}/tokenize", content=b" " * (limit + 1), headers=JSON)
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "payload_too_large"

    def chunks() -> Any:
        for _ in range(limit // 65536 + 2):
            yield b" " * 65536

    streamed = httpx.post(f"{worker.base_url}/v1/completions", content=chunks(), headers=JSON)
    assert streamed.status_code == 413
    assert streamed.json()["error"]["code"] == "payload_too_large"
    just = b'{"content": "a"' + b" " * (limit - 16) + b"}"
    assert httpx.post(f"{worker.base_url}/tokenize", content=just, headers=JSON).status_code == 200


def test_limits_are_the_settings(scripted: ScriptedFactory) -> None:
    worker = scripted(max_prompt_chars=10, max_tokens_out=5, max_body_bytes=1024)
    body = {"job_id": "x", "prompt": "12345678901", "max_tokens": 6}
    faults = faults_of(worker, body)
    assert set(faults) == {"prompt", "max_tokens"}
    assert "it has 11 characters" in faults["prompt"]["message"]
    answer = httpx.post(f"{worker.base_url}/v1/inference", json={"prompt": "1234567890"})
    assert answer.status_code == 200
    assert worker.supervisor.requests[-1].max_tokens == 5, "the cap is the default"
    large = httpx.post(f"{worker.base_url}/tokenize", json={"content": "a" * 1024})
    assert large.status_code == 413


def test_at_most_32_faults_are_listed(worker: WorkerProcess) -> None:
    body = {f"unknown_{n}": n for n in range(100)} | {"prompt": "a"}
    assert len(worker.post("/v1/inference", body).json()["errors"]) == 32
    many = {f"unknown_{n}": n for n in range(1000)}
    assert len(worker.post("/v1/inference", many).json()["errors"]) == 1
