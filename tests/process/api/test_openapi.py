"""`/openapi.json` is valid, complete, and true to what the worker answers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
from openapi_spec_validator import validate
from pydantic import TypeAdapter
from starlette.types import Scope

from tests import ROOT
from tests.conftest import StartWorker
from tests.support.scripted_api import ScriptedFactory
from tests.support.worker import WorkerProcess
from worker.api.app import DIALECTS
from worker.api.http import headers
from worker.api.http.operation import AsInReference

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
GOOD: dict[str, dict[str, Any]] = {
    "/execute": {"job_id": "doc-1", "prompt": "Once", "max_tokens": 2},
    "/v1/inference/stream": {"prompt": "Once", "max_tokens": 2},
    "/v1/inference": {"prompt": "Once", "max_tokens": 2, "stop": ["."]},
    "/cancel": {"job_id": "doc-1"},
    "/tokenize": {"content": "Once"},
    "/detokenize": {"tokens": [5, 6]},
    "/apply-template": {"messages": FRANCE},
    "/v1/chat/completions": {"messages": FRANCE, "logprobs": True, "max_tokens": 3},
    "/v1/completions": {"prompt": "Once", "logprobs": 1, "n": 2},
    "/v1/responses": {"input": "What is the capital of France?", "max_output_tokens": 3},
    "/v1/messages": {"model": "m", "messages": FRANCE, "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": "m", "messages": FRANCE},
    "/v1/chat/completions/input_tokens": {"messages": FRANCE},
    "/v1/responses/input_tokens": {"input": "What is the capital of France?"},
    "/chat/completions": {"messages": FRANCE, "max_tokens": 3},
    "/completions": {"prompt": ["Once", "One"], "max_tokens": 3},
    "/completion": {"prompt": "Once", "n_predict": 3, "n_probs": 1},
    "/api/chat": {"model": "any", "messages": FRANCE, "options": {"num_predict": 3}},
    "/api/generate": {"model": "any", "prompt": "Once", "stream": False, "logprobs": True},
    "/tools": {"tool": "read_file", "params": {}},
    "/api/show": {"model": "any"},
    "/api/pull": {"model": "tiny-model"},
    "/v1/streams/lookup": {"conversation_ids": ["doc"]},
    "/api/embed": {"model": "any", "input": []},
    "/api/embeddings": {"model": "any", "prompt": ""},
}
NOT_OF_THIS_MODEL = (
    *("/v1/embeddings", "/embedding", "/v1/rerank", "/infill", "/lora-adapters"),
    "/v1/chat/completions/control",
)
"""Operations for which the bundled model has no valid request."""


@pytest.fixture(scope="module")
def document(worker: WorkerProcess) -> dict[str, Any]:
    found: dict[str, Any] = worker.get("/openapi.json").json()
    return found


def test_the_document_is_valid_and_lists_every_route(document: dict[str, Any]) -> None:
    validate(document)
    routes = {
        (operation.path, operation.method.lower())
        for dialect in DIALECTS
        for operation in dialect.operations
        if operation.path != "/"  # the page's
    }
    assert routes == {(p, method) for p, found in document["paths"].items() for method in found}


def test_each_body_that_operations_have_has_a_valid_example() -> None:
    bodies = {each.path: each for dialect in DIALECTS for each in dialect.operations if each.body}
    examined = [bodies.pop(path) for path in (*GOOD, *NOT_OF_THIS_MODEL)]
    left = {path for path, each in bodies.items() if each.body not in [a.body for a in examined]}
    assert not left, "GOOD has no body for these"


def test_the_limits_in_the_document_are_this_workers(
    document: dict[str, Any], worker: WorkerProcess
) -> None:
    execute = document["components"]["schemas"]["ExecuteRequest"]
    assert execute["properties"]["top_k"]["maximum"] == 1024
    assert execute["properties"]["max_tokens"]["maximum"] == 1024
    assert execute["additionalProperties"] is False
    assert execute["required"] == ["job_id", "prompt"]
    assert all(field.get("description") for field in execute["properties"].values())


def test_a_description_and_default_belong_to_the_field_even_if_it_may_be_null(
    document: dict[str, Any],
) -> None:
    for schema in document["components"]["schemas"].values():
        for name, field in schema.get("properties", {}).items():
            if {"type": "null"} in (parts := field.get("anyOf", [])):
                assert not any(part.keys() & {"description", "default"} for part in parts), name
                assert "_'" not in str(field.get("default")), "its fields' names are not JSON's"


HEADERS_OF_HTTP = {
    "date", "server", "content-type", "content-length", "transfer-encoding", "cache-control",
    "x-accel-buffering",
}  # fmt: skip
"""Response headers; the last is nginx's."""


def resolved(document: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Resolve a reference."""
    if "$ref" not in found:
        return found
    there: Any = document
    for name in found["$ref"].removeprefix("#/").split("/"):
        there = there[name]
    return resolved(document, there)


def conforms(document: dict[str, Any], path: str, answer: httpx.Response) -> None:
    """Check that the answer's status, headers and body match the document."""
    operation = document["paths"][path][answer.request.method.lower()]
    promised = operation["responses"][str(answer.status_code)]
    media_type = answer.headers["content-type"].split(";")[0]
    assert media_type in promised["content"], (path, media_type)
    described = {name.lower() for name in promised["headers"]}
    assert answer.headers.keys() - HEADERS_OF_HTTP <= described, path
    required = {
        name.lower()
        for name, reference in promised["headers"].items()
        if resolved(document, reference)["required"]
    }
    assert {"x-correlation-id", "x-request-id", "request-id"} <= required <= answer.headers.keys()
    if media_type == "application/json":
        reference = promised["content"][media_type]["schema"]
        jsonschema.Draft202012Validator(
            reference | {"components": document["components"]}
        ).validate(answer.json())


READ = ["/health", "/ready", "/v1/ready", "/info", "/metrics", "/openapi.json", "/v1/models"]
READ += ["/v1/health", "/v2/health/live", "/v2/health/ready", "/models", "/props", "/slots"]
READ += ["/tools", "/api/tags", "/api/ps", "/api/version"]


@pytest.mark.parametrize("path", [*READ, "/v1/loading/progress"])
def test_answers_to_get_conform(document: dict[str, Any], worker: WorkerProcess, path: str) -> None:
    answer = worker.get(path)
    assert answer.status_code == 200
    conforms(document, path, answer)


@pytest.mark.parametrize("path", GOOD)
def test_answers_to_valid_bodies_conform(
    document: dict[str, Any], worker: WorkerProcess, path: str
) -> None:
    operation = document["paths"][path]["post"]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator(reference | {"components": document["components"]}).validate(
        GOOD[path]
    )
    answer = worker.post(path, GOOD[path])
    assert answer.status_code == (202 if path == "/cancel" else 200), answer.text
    conforms(document, path, answer)


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]], ids=str)
def test_chosen_fields_conform(
    document: dict[str, Any], worker: WorkerProcess, prompt: str | list[str]
) -> None:
    body = {"prompt": prompt, "max_tokens": 1, "response_fields": ["", "content", "timings/no"]}
    answer = worker.post("/completion", body)
    conforms(document, "/completion", answer)
    found = answer.json() if isinstance(prompt, list) else [answer.json()]
    assert [each.keys() for each in found] == [{"content"}] * len(found)


def test_a_kept_stream_conforms(document: dict[str, Any], worker: WorkerProcess) -> None:
    body = {"job_id": "doc-kept", "prompt": "Once", "max_tokens": 2}
    with worker.client() as client:
        begun = client.post("/execute", json=body, headers={"X-Llorch-Resume": "1"})
        conforms(document, "/execute", begun)
        again = client.get("/execute/doc-kept", headers={"Last-Event-ID": "0"})
        conforms(document, "/execute/{job_id}", again)
        other = client.get("/v1/stream", params={"conv_id": "doc-kept"})
        conforms(document, "/v1/stream", other)
        prompt = {"model": "any", "prompt": "Once"}
        lines = client.post("/api/generate", json=prompt, headers={"X-Llorch-Resume": "1"})
        conforms(document, "/api/generate", lines)
        rest = client.get(f"/execute/{lines.headers['x-llorch-resume']}", params={"from": 9})
        conforms(document, "/execute/{job_id}", rest)
    assert begun.headers["x-llorch-resume"] == "doc-kept" and again.text in begun.text
    assert rest.content == lines.content[9:]


API = ROOT / "worker/api"
NATIVE = ("/execute", "/v1/inference", "/v1/inference/stream")
KEPT = ("/execute/{job_id}", "/v1/stream", "/v1/streams/lookup")
OF_A_GATEWAY = {"x-llorch-worker"}
"""Headers that a worker does not read."""
SOME = {
    "X-Llorch-Resume": "1", "X-Llorch-Late-Head": "1", "X-Deadline": "99999999999999",
    "Last-Event-ID": "0", "Accept": "application/x-ndjson",
}  # fmt: skip
HEADS: tuple[dict[str, str], ...] = ({}, SOME, SOME | {"X-Conversation-Id": "another"})
"""Request heads; with a conversation id, a stream is kept whatever `X-Llorch-Resume` says."""


def test_the_headers_that_an_operation_reads_are_described(
    scripted: ScriptedFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record the headers that are read: those with a description must be in the operation. For a
    valid request, there must be no others in it."""
    looked_up: set[headers.Header] = set()

    plain_all = headers.Header.all

    def values(header: headers.Header, scope: Scope) -> list[str]:
        looked_up.add(header)
        return plain_all(header, scope)

    monkeypatch.setattr(headers.Header, "all", values)
    n_whole = 0
    with httpx.Client(base_url=scripted().base_url, trust_env=False) as client:
        document = client.get("/openapi.json").json()
        job = {"job_id": "kept", "prompt": "Once"}
        assert client.post("/execute", json=job, headers={"X-Llorch-Resume": "1"}).is_success
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                looked_up.clear()
                asked_with_each_head(client, method, path)
                read = {each.name.lower() for each in looked_up if each.in_request is not None}
                described = parameters_in(document, operation)
                assert looked_up <= {*headers.ALL} and read <= described, (method, path)
                is_whole = read == described - OF_A_GATEWAY
                assert is_whole or path not in (*NATIVE, *READ, *KEPT), (method, path)
                n_whole += is_whole
    assert n_whole >= 60


def asked_with_each_head(client: httpx.Client, method: str, path: str) -> None:
    for n, head in enumerate(HEADS if method == "post" else [SOME]):
        body = GOOD.get(path, {}) | ({"job_id": f"{path} {n}"} if path in NATIVE else {})
        if "messages" in body or "prompt" in body and path not in NATIVE:
            body = body | {"stream": True}
        answer = client.request(
            method, path.replace("{job_id}", "kept"), headers=head, params={"conv_id": "kept"},
            json=body if method == "post" else None,
        )  # fmt: skip
        if answer.status_code == 500:  # without an engine
            return


def test_the_query_parameters_that_are_read_are_described(document: dict[str, Any]) -> None:
    sources = [path.read_text("utf-8") for path in API.rglob("*.py")]
    uses = sum(text.count("query_params") for text in sources)
    read = [name for text in sources for name in re.findall(r'query_params\.get\("(\w+)"\)', text)]
    assert len(read) == uses > 0
    described = {
        (path, each["name"], each.get("required", False))
        for path, methods in document["paths"].items()
        for operation in methods.values()
        for each in operation["parameters"]
        if each.get("in") == "query"
    }
    assert {name for _, name, _ in described} == set(read)
    assert described >= {
        ("/execute/{job_id}", "from", False),
        ("/v1/stream", "from", False),
        ("/v1/stream", "conv_id", True),
    }


def parameters_in(document: dict[str, Any], operation: dict[str, Any]) -> set[str]:
    """Return the headers in the operation's description."""
    parameters = (resolved(document, each) for each in operation["parameters"])
    return {each["name"].lower() for each in parameters if each["in"] == "header"}


def test_an_answer_in_another_projects_form_has_a_link(document: dict[str, Any]) -> None:
    """An answer without a schema of its own has a link to its documentation."""
    form, linked = TypeAdapter(AsInReference).json_schema()["description"], 0
    for path, methods in document["paths"].items():
        for operation in methods.values():
            whole = operation["responses"].get("200", {}).get("content", {}).values()
            if any(each["schema"].get("description") == form for each in whole):
                assert operation["externalDocs"]["url"].startswith("https://"), path
                linked += 1
    assert linked > 10


@pytest.mark.parametrize("path", [*GOOD, *NOT_OF_THIS_MODEL])
def test_refusals_of_invalid_bodies_conform(
    document: dict[str, Any], worker: WorkerProcess, path: str
) -> None:
    # As in llama-server, a missing text is an empty one.
    nothing = () if path in ("/tokenize", "/detokenize") else (b"{}", b'{"unknown": 1}')
    for content in (*nothing, b"[1]", b"{"):
        answer = httpx.post(
            worker.base_url + path, content=content, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400
        conforms(document, path, answer)


def test_refusals_of_missing_jobs_and_models_conform(
    document: dict[str, Any], worker: WorkerProcess
) -> None:
    no_job = worker.post("/cancel", {"job_id": "never"})
    assert no_job.status_code == 404 and no_job.json()["code"] == "JOB_NOT_FOUND"
    conforms(document, "/cancel", no_job)
    conforms(document, "/v1/models/{model}", worker.get("/v1/models/gpt-4"))
    no_encoder = worker.post("/v1/embeddings", {"input": "a", "unknown": 1})
    assert no_encoder.headers["x-ignored-fields"] == "unknown", "a refusal names them, too"
    assert no_encoder.status_code == 400 and no_encoder.json()["error"]["param"] == "model"
    conforms(document, "/v1/embeddings", no_encoder)


def test_the_pooling_that_the_refusal_of_embeddings_names_makes_them(
    worker: WorkerProcess, start_worker: StartWorker
) -> None:
    refused = worker.post("/v1/embeddings", {"input": "a"}).json()["error"]["message"]
    (flags,) = re.findall(r"start a worker with (--pooling \w+)", refused)
    assert start_worker(*flags.split()).post("/v1/embeddings", {"input": "a"}).status_code == 200
    ranks = worker.post("/v1/rerank", {"query": "a", "documents": ["b"]}).json()["error"]["message"]
    assert ranks.endswith("this model generates text and does not rank")


@pytest.mark.long
def test_two_thousand_made_up_requests(start_worker: StartWorker, tmp_path: Path) -> None:
    """Valid and invalid ones, which schemathesis generates from the document."""
    worker = start_worker("--max-tokens-out", "4")
    command = [
        str(Path(sys.executable).parent / "schemathesis"),
        "run",
        f"{worker.base_url}/openapi.json",
        "--exclude-path=/shutdown",
        "--exclude-path=/v1/loading/progress",
        "--checks=not_a_server_error,status_code_conformance,content_type_conformance,"
        "response_schema_conformance",
        "--phases=coverage,fuzzing",
        "--max-examples=60",
        "--seed=2",
        # A deadline in the past is a 504 by contract, so none is generated.
        "--header=X-Deadline: 99999999999999",
        "--no-color",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(*re.findall(r".*\d+ generated.*", done.stdout))
    found = re.search(r"(\d+) generated", done.stdout)
    assert found and int(found.group(1)) >= 2000
    assert worker.is_ready() and not worker.logs("request.broken")
